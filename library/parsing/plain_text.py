"""Bytes in any common encoding to text without control characters."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress

from library.parsing.unreadable_file import refuse_kind

_BOMS = (  # UTF-32's begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_SAMPLE_BYTES = 65_536  # of lines that are not ASCII: guessing an encoding is slow
_FEW = 100  # one control character in so many is dropped; more are no text
_COMMON = (  # one of each family; with the rare ones, guesses are often wrong
    *("cp1250", "iso8859_2", "cp1251", "koi8_r", "cp866", "cp1252", "cp850", "mac_roman"),
    *("cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp874"),
    *("cp932", "euc_jp", "gb18030", "big5", "cp949"),
)
_LETTERS = "À-ÖØ-öø-ÿŒœ"
_NOT_WESTERN = re.compile(  # what other encodings look like when they are read as cp1252
    rf"[þðýÞÝÐŠšŽžŸƒ]|[A-Za-z{_LETTERS}][^\0-\x7f{_LETTERS}’–—…][A-Za-z{_LETTERS}]"
    rf"|[{_LETTERS}]{{3}}|[a-z][À-ÖØ-Ý]"
)
_WIDER = {"iso8859-1": "cp1252", "ascii": "cp1252", "gb2312": "gb18030", "shift_jis": "cp932"}

_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # colours of a terminal's log
_CONTROL = re.compile(r"[\0-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
# Byte order marks, noncharacters, and tags, which only machines see.
_UNSEEN = re.compile(r"[\ufeff\ufdd0-\ufdef\ufffe\uffff\U000e0000-\U000e007f]")
_SPACE = re.compile(r"[\x0b\x0c\x85]")  # no line ends in editors: line numbers stay the file's
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def clean_text(text: str) -> str:
    """Return the text with a line feed as its only line end, without control characters."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROL.sub("", _TERMINAL.sub("", text))
    return _SURROGATE.sub("\ufffd", _SPACE.sub(" ", _UNSEEN.sub("", text)))


def decode_text(data: bytes, declared: str | None = None) -> tuple[str, str | None]:
    """Return bytes as clean text, and the encoding that they were taken for if it was a guess.

    `declared` is the encoding that the file claims to have.

    Raises:
        UnreadableFile: The bytes are no text.
    """
    text, guess = _decode(data, declared)
    num_controls = sum(1 for _ in _CONTROL.finditer(_TERMINAL.sub("", text)))
    if num_controls * _FEW > len(text):
        refuse_kind()
    return clean_text(text), guess


def _decode(data: bytes, declared: str | None) -> tuple[str, str | None]:
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return data[len(bom) :].decode(encoding, "replace"), None
    with suppress(UnicodeDecodeError):
        return data.decode(), None
    if declared:
        with suppress(LookupError, ValueError):  # unknown, or not what the bytes are
            name = codecs.lookup(declared).name
            return data.decode(_WIDER.get(name, name)), None
    zeros = data[::2].count(0), data[1::2].count(0)  # of UTF-16: the upper bytes of Latin letters
    if max(zeros) * 6 > len(data) and min(zeros) * 10 < max(zeros):
        guess = "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
        return data.decode(guess, "replace"), guess
    text = data.decode(errors="replace")
    num_bad = text.count("\ufffd")
    num_wide = len(data) - len(text)  # at least one more byte than characters for each good one
    if num_wide > 20 * num_bad:  # UTF-8 with a few broken places
        return text, "utf-8"
    strange = b"\n".join(line for line in data.split(b"\n") if not line.isascii())
    guess = _guess_encoding(strange[:_SAMPLE_BYTES])
    return data.decode(guess, "replace"), guess


def _guess_encoding(sample: bytes) -> str:
    """Return the encoding of bytes that are not UTF-8.

    charset-normalizer takes French for Czech, so Western text is recognised before it is asked.
    """
    with suppress(UnicodeDecodeError):
        text = sample.decode("cp1252")
        is_hungarian = "õ" in text and not re.search("[ãç]", text)  # ő, where cp1252 has õ
        if not _NOT_WESTERN.search(text) and not is_hungarian:
            return "cp1252"
    from charset_normalizer import from_bytes  # only here: its import takes longer than most files

    guess = from_bytes(sample, cp_isolation=list(_COMMON)).best()
    if guess is None:
        refuse_kind()
    return guess.encoding
