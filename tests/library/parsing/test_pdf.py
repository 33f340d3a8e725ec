import io

import pypdf
import pytest

from library.parsing import Layout, ParsingLimits
from tests.library.parsing.reading_files import read, refuse
from tests.library.parsing.small_pdf import join, stream, write_pdf

PAGES = [
    [
        (72, 700, "The harbor of Belaron is inter-"),
        (72, 686, "national and well-"),
        (72, 672, "known."),
    ],
    [],
    [(72, 640, "One - with a dash -"), (300, 100, "Tessin at the foot")],
]
TEXT = (
    "The harbor of Belaron is inter-\nnational and well-\nknown.\n\n"
    "One - with a dash -\nTessin at the foot"
)


def encrypt(data: bytes, user: str, owner: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(data))
    writer.encrypt(user, owner, algorithm="AES-256")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def test_lines_and_pages_are_kept():
    parsed = read(write_pdf([*PAGES, []]), "a.pdf")
    assert parsed.text == TEXT
    third = TEXT.index("One")
    assert [page.start for page in parsed.layout.pages] == [0, third, third, len(TEXT)]
    assert {(page.width, page.height) for page in parsed.layout.pages} == {(612.0, 792.0)}
    assert Layout.from_bytes(parsed.layout.to_bytes()) == parsed.layout


@pytest.mark.parametrize(
    ("word", "page", "line", "x", "y"),
    [("harbor", 1, 1, 95, 700), ("national", 1, 2, 75, 686), ("Tessin", 3, 6, 301, 100)],
)
def test_a_word_leads_to_its_page_line_and_box(word, page, line, x, y):
    parsed = read(write_pdf(PAGES), "a.pdf")
    start = parsed.text.index(word)
    where = parsed.layout.locate(start, start + len(word))
    assert (where.pages, where.lines) == (range(page, page + 1), range(line, line + 1))
    (box,) = where.boxes
    assert box.page == page
    assert box.left <= x <= box.right
    assert box.top <= 792 - y - 1 <= box.bottom
    assert box.bottom - box.top < 13


@pytest.mark.parametrize(
    ("rotate", "size", "corner"),
    [(0, (400, 800), (62, 120)), (90, (800, 400), (680, 62)), (180, (400, 800), (338, 680))],
)
def test_boxes_are_on_the_page_as_it_is_shown(rotate, size, corner):
    """`corner` is where the first letter's lower left corner is shown."""
    data = write_pdf([[(72, 700, "word")]], rotate=rotate, media_box=(10, 20, 410, 820))
    layout = read(data, "a.pdf").layout
    assert (layout.pages[0].width, layout.pages[0].height) == size
    (box,) = layout.locate(0, 4).boxes
    assert box.left - 1 <= corner[0] <= box.right + 1
    assert box.top - 1 <= corner[1] <= box.bottom + 1


@pytest.mark.parametrize(
    ("side", "height"), [(841.8898, 841.9), (10**9, 1e6), (-5, 5.0), (0, 792.0)]
)
def test_pages_of_any_size_have_a_layout_that_can_be_stored(side, height):
    data = write_pdf([[(72, 700, "word")]], media_box=(0, 0, 595.276, side))
    layout = read(data, "a.pdf").layout
    assert layout.pages[0].height == height
    assert Layout.from_bytes(layout.to_bytes()) == layout


def test_letters_of_every_kind_are_read_with_their_places():
    data = write_pdf([[(72, 700, "aXb Y"), (72, 686, "next")]], names={"X": "😀", "Y": "ffi"})
    parsed = read(data, "a.pdf")
    assert parsed.text == "a😀b ffi\nnext"
    first, second = parsed.layout.locate(0, len(parsed.text)).boxes
    assert first.bottom < second.top


def test_pypdf_reads_a_page_that_pdfium_cannot(monkeypatch):
    data = write_pdf([[(72, 700, "first")], [(72, 700, "seXond")]], names={"X": "\ufffe"})
    assert read(data, "a.pdf").text == "first\n\nseond"
    monkeypatch.setattr("pypdf._page.PageObject.extract_text", lambda page: " second\nopinion ")
    parsed = read(data, "a.pdf")
    assert parsed.text == "first\n\n second\nopinion"
    assert [box.page for box in parsed.layout.locate(0, 20).boxes] == [1]


def test_what_was_filled_into_a_form_is_read():
    field = stream("BT /F1 12 Tf 2 5 Td (Vael) Tj ET").replace(
        b"<<", b"<</Subtype/Form/BBox[0 0 200 20]/Resources<</Font<</F1 3 0 R>>>>", 1
    )
    data = join(
        [
            b"<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[6 0 R]>>>>",
            b"<</Type/Pages/Count 1/Kids[4 0 R]>>",
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 5 0 R/Annots[6 0 R]"
            b"/Resources<</Font<</F1 3 0 R>>>>>>",
            stream("BT /F1 12 Tf 50 50 Td (Tenant:) Tj ET"),
            b"<</Subtype/Widget/FT/Tx/T(a)/V(Vael)/F 4/Rect[50 10 250 30]/AP<</N 7 0 R>>>>",
            field,
        ]
    )
    assert read(data, "a.pdf").text == "Tenant:\nVael"


def test_a_pdf_of_pictures_is_refused():
    code, message = refuse(write_pdf([[], []]), "a.pdf")
    assert code == "empty_file"
    assert "OCR" in message


def test_only_a_password_that_is_needed_is_asked_for():
    assert refuse(encrypt(write_pdf(PAGES), "secret", "owner"), "a.pdf")[0] == "encrypted_file"
    assert read(encrypt(write_pdf(PAGES), "", "owner"), "a.pdf").text == TEXT


@pytest.mark.parametrize(
    "data",
    [
        b"%PDF-1.7\n" + b"garbage" * 100,
        write_pdf(PAGES)[:700],
        write_pdf(PAGES, count=9),
        write_pdf(PAGES).replace(b"/Kids[5 0 R", b"/Kids[2 0 R"),
    ],
    ids=["garbage", "cut", "pages that are missing", "pages that hold themselves"],
)
def test_a_broken_pdf_is_refused(data):
    assert refuse(data, "a.pdf")[0] == "broken_file"


def test_pages_and_characters_are_limited():
    code, message = refuse(write_pdf(PAGES), "a.pdf", ParsingLimits(pages=2))
    assert (code, "2 pages" in message) == ("parsing_limit", True)
    assert refuse(write_pdf(PAGES), "a.pdf", ParsingLimits(text_chars=20))[0] == "parsing_limit"
    assert read(write_pdf(PAGES), "a.pdf", ParsingLimits(pages=3)).text == TEXT
