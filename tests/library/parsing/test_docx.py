import io
import zipfile

import docx
import pytest

from library.parsing import ParsingLimits
from tests.library.parsing.reading_files import read, refuse

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def save(document) -> bytes:
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


KIND = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"


def pack(
    body: str, doctype: str = "", extra: dict[str, bytes] | None = None, kind: str = KIND
) -> bytes:
    parts = {
        "[Content_Types].xml": f'<Types><Override PartName="/d.xml" ContentType="{kind}"/></Types>',
        "d.xml": f'{doctype}<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>',
        **(extra or {}),
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return file.getvalue()


def test_paragraphs_headings_lists_and_tables_stand_in_order():
    document = docx.Document()
    document.add_heading("The lease", 0)
    document.add_heading("Rent", 2)
    document.add_paragraph("Due\tmonthly,\nin advance.")
    document.add_paragraph("one", style="List Bullet")
    document.add_paragraph("two", style="List Number")
    table = document.add_table(2, 2)
    table.cell(0, 0).text = "who"
    table.cell(0, 1).text = "what"
    table.cell(1, 0).text = "the\ntenant"
    table.cell(1, 1).add_table(1, 2).cell(0, 1).text = "inner"
    document.add_paragraph("End")
    parsed = read(save(document), "upload")
    assert parsed.text == (
        "# The lease\n\n## Rent\n\nDue\tmonthly,\nin advance.\n\n- one\n- two\n\n"
        "who | what\nthe tenant | | inner\n\nEnd"
    )
    assert parsed.media_type.endswith("wordprocessingml.document")
    assert parsed.layout.locate(0, 1).lines == range(1, 2)


def test_tracked_and_nested_text_is_read_once():
    run = "<w:r><w:t>{}</w:t></w:r>"
    body = (
        f"<w:sdt><w:sdtContent><w:p>{run.format('control')}</w:p></w:sdtContent></w:sdt>"
        f"<w:p><w:pPr><w:tabs><w:tab/></w:tabs></w:pPr><w:ins>{run.format('added')}</w:ins>"
        f"<w:del><w:r><w:delText>removed</w:delText></w:r></w:del>"
        f"<w:moveFrom>{run.format('away')}</w:moveFrom></w:p>"
        f"<w:p>{run.format('before')}<w:r><x:AlternateContent xmlns:x='urn:x'><x:Choice><w:p>"
        f"{run.format('box')}</w:p></x:Choice><x:Fallback><w:p>{run.format('box')}</w:p>"
        f"</x:Fallback></x:AlternateContent></w:r></w:p>"
    )
    assert read(pack(body), "a.docx").text == "control\n\nadded\n\nbefore\n\nbox"


def test_other_archives_are_unsupported():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("words.txt", "words")
    assert refuse(file.getvalue(), "a.zip")[0] == "unsupported_file"
    assert refuse(pack("", kind="spreadsheetml.sheet.main+xml"), "a.xlsx")[0] == "unsupported_file"


@pytest.mark.parametrize("damage", [lambda d: d[:-30], lambda d: d[:60] + b"?" * 40 + d[100:]])
def test_a_broken_document_is_refused(damage):
    assert refuse(damage(save(docx.Document())), "a.docx")[0] == "broken_file"
    assert refuse(pack("<w:p>"), "a.docx")[0] == "broken_file"


def test_an_empty_document_is_refused():
    assert refuse(pack("<w:p/>"), "a.docx")[0] == "empty_file"


def test_an_encrypted_document_is_told_from_an_old_one():
    ole = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(3000)
    code, message = refuse(ole + "EncryptedPackage".encode("utf-16-le"), "a.docx")
    assert code == "encrypted_file"
    assert "password" in message
    assert refuse(ole, "a.docx")[0] == "unsupported_file"
    locked = bytearray(pack("<w:p/>"))
    for entry, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        locked[locked.index(entry) + offset] |= 1
    assert refuse(bytes(locked), "a.docx")[0] == "encrypted_file"


def test_a_zip_bomb_is_refused_before_it_unpacks():
    text = f"<w:p><w:r><w:t>{'a' * 1_000_000}</w:t></w:r></w:p>"
    data = pack(text)
    assert len(data) < 10_000
    code, message = refuse(data, "a.docx", ParsingLimits(unpacked_bytes=500_000))
    assert code == "file_too_large"
    assert "500000" in message
    pictures = pack("<w:p><w:r><w:t>a</w:t></w:r></w:p>", extra={"p.png": bytes(1_000_000)})
    assert read(pictures, "a.docx", ParsingLimits(unpacked_bytes=500_000)).text == "a"


def test_a_part_that_says_it_is_smaller_than_it_is_is_broken():
    data = bytearray(pack(f"<w:p><w:r><w:t>{'a' * 1_000_000}</w:t></w:r></w:p>"))
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = (1000).to_bytes(4, "little")
    assert refuse(bytes(data), "a.docx")[0] == "broken_file"


def test_entities_are_refused_unexpanded():
    doctype = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
    code, message = refuse(pack("<w:p><w:r><w:t>&b;</w:t></w:r></w:p>", doctype), "a.docx")
    assert code == "broken_file"
    assert "entities" in message
