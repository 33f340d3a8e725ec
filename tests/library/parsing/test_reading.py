import pickle
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.parsing import ParsingLimits, UnreadableFile
from rapid.errors import BadRequest
from tests.library.parsing.reading_files import read, refuse

GERMAN = "Die Gebühr für die Übergabe beträgt zehn Euro.\nGrüße aus Köln: schöne Häuser.\n"
FRENCH = "L’été dernier, nous avons été très étonnés — « voilà » où ça mène : cœur, garçon.\n"
POLISH = "Zażółć gęślą jaźń. Właściciel mieszkania przyjmuje wpłatę w złotych.\n"
RUSSIAN = "Договор аренды заключён между сторонами. Срок действия договора один год.\n"
JAPANESE = "契約の期間は一年とする。借主は毎月の賃料を支払うものとします。\n"
CHINESE = "合同期限为一年。承租人应当按月支付租金。\n"
HUNGARIAN = "A szerződés időtartama egy év. Az őszi fűtés díja külön fizetendő.\n"
EVERY_LETTER = GERMAN + FRENCH + POLISH + RUSSIAN + JAPANESE + "😀"


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be"]
)
def test_every_unicode_encoding_is_read(encoding):
    text = "Plain words at first, as most files have them.\n" * 20 + EVERY_LETTER
    assert read(text.encode(encoding), "a.txt").text == text


def test_byte_order_marks_of_both_directions_are_read():
    for bom, encoding in [("\ufeff", "utf-16-be"), ("\ufeff", "utf-32-be")]:
        assert read((bom + EVERY_LETTER).encode(encoding), "a.txt").text == EVERY_LETTER


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (GERMAN, "latin-1"),
        (GERMAN, "mac_roman"),
        (FRENCH, "cp1252"),
        ("The tenant’s “deposit” is £500 – due in 30 days.\n", "cp1252"),
        (POLISH, "cp1250"),
        (POLISH, "iso8859-2"),
        (HUNGARIAN, "cp1250"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8-r"),
        ("Η σύμβαση ισχύει για ένα έτος από την υπογραφή της.\n", "cp1253"),
        ("תקופת החוזה היא שנה אחת. השוכר ישלם את דמי השכירות.\n", "cp1255"),
        ("مدة العقد سنة واحدة. يدفع المستأجر الإيجار شهريا.\n", "cp1256"),
        (JAPANESE, "cp932"),
        (JAPANESE, "euc_jp"),
        (CHINESE, "gb18030"),
        ("合約期限為一年。承租人應當按月支付租金。\n", "big5"),
        ("계약 기간은 일년으로 한다. 임차인은 매월 임대료를 지급한다.\n", "euc_kr"),
    ],
)
def test_older_encodings_are_recognised(text, encoding):
    assert read(text.encode(encoding), "a.txt").text == text


def test_utf_8_with_a_broken_byte_stays_utf_8():
    data = (EVERY_LETTER * 20).encode() + b"\xff end"
    assert read(data, "a.txt").text == EVERY_LETTER * 20 + "\ufffd end"


def test_the_text_has_no_control_characters_and_one_kind_of_line_end():
    text = "a\r\nb\rc\x00\n" + "d\x0ce\x1b[31mred\x1b[0m\tf\x85g\ufeff\ufffe\U000e0041h" + "." * 200
    assert read(text.encode(), "a.log").text == "a\nb\nc\nd ered\tf gh" + "." * 200


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.sampled_from(["a.txt", "a.md", "a"]))
def test_any_text_is_read_clean_or_refused(text, name):
    try:
        parsed = read(text.encode(), name)
    except UnreadableFile as error:
        assert error.code in ("empty_file", "unsupported_file", "broken_file")  # noqa: PT017
        return
    parsed.text.encode()
    assert not [c for c in parsed.text if c < " " and c not in "\n\t"]
    assert parsed.layout.locate(0, 1).lines == range(1, 2)


@pytest.mark.parametrize(
    ("name", "content", "media_type"),
    [
        ("a.txt", "<html>source", "text/plain"),
        ("notes", "words", "text/plain"),
        ("code.py", "print(1)", "text/plain"),
        ("A.MD", "# Title", "text/markdown"),
        ("page", "<!-- x -->\n<!DOCTYPE html><p>words", "text/html"),
        ("page.htm", "words", "text/html"),
        ("page", "<!---->" * 140 + "words", "text/plain"),
    ],
)
def test_the_kind_follows_from_content_and_name(name, content, media_type):
    assert read(content.encode(), name).media_type == media_type


@pytest.mark.parametrize(
    ("data", "name", "code"),
    [
        (b"", "a.txt", "empty_file"),
        (b" \n\x0c\n", "a.txt", "empty_file"),
        (b"<html><script>x</script></html>", "a.html", "empty_file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(500), "a.png", "unsupported_file"),
        (b"\x7fELF" + bytes(500), "a.txt", "unsupported_file"),
        (random.Random(0).randbytes(5000), "a", "unsupported_file"),
        (rb"{\rtf1 words}", "a.rtf", "unsupported_file"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500), "a.doc", "unsupported_file"),
        (b"just words", "a.pdf", "broken_file"),
        (b"just words", "a.docx", "broken_file"),
    ],
)
def test_what_cannot_be_read_is_refused(data, name, code):
    refused, message = refuse(data, name)
    assert refused == code
    assert re.search(r"\b([Ss]end|Use)\b", message)  # what to do instead


def test_sizes_are_limited():
    limits = ParsingLimits(file_bytes=1000, text_chars=100)
    assert refuse(b"a" * 1001, "a.txt", limits)[0] == "file_too_large"
    assert refuse(b"a" * 999, "a.txt", limits)[0] == "parsing_limit"
    assert refuse(b"a" * 101, "a.txt", limits)[0] == "parsing_limit"
    assert read(b"a" * 100, "a.txt", limits).text == "a" * 100
    assert refuse(b"<p>" + b"a" * 101, "a.html", limits)[0] == "parsing_limit"


def test_the_error_survives_another_process():
    error = pickle.loads(pickle.dumps(UnreadableFile("Send another.", "empty_file")))
    assert (str(error), error.code, error.param) == ("Send another.", "empty_file", "file")
    assert isinstance(error, BadRequest)
