"""The text of a PDF with the place of each line, by PDFium; pypdf reads pages that it cannot."""

from __future__ import annotations

import ctypes
import re
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

import pypdfium2
from pypdfium2 import raw

from library.parsing.layout import TENTHS, Layout, PageExtent
from library.parsing.parsing_limits import ParsingLimits, Progress
from library.parsing.plain_text import clean_text
from library.parsing.unreadable_file import refuse_broken, refuse_empty, refuse_encrypted

if TYPE_CHECKING:
    from pypdf import PdfReader

Line = tuple[str, tuple[int, int, int, int]]  # its text and edges, as `Layout` has them

_HYPHEN = "\ufffe"  # PDFium's mark of a hyphen at a line's end, after which the word goes on
_HYPHEN_CODE = 2  # the same, where it gives single characters
_LINE = re.compile(rf"[^\r\n{_HYPHEN}]+{_HYPHEN}?")
_UNKNOWN = re.compile("[\0\uffff]")  # of fonts that do not say which characters they draw
_LARGEST = 1e6  # points of a page's side, 350 m: beyond, places do not fit the layout's numbers
_NOWHERE = (0, 0, 0, 0)  # the edges of a line whose place is not known


def read_pdf(
    file: BinaryIO, limits: ParsingLimits, on_progress: Progress | None
) -> tuple[str, Layout]:
    """Return the text of a PDF, its pages joined by blank lines, and its layout."""
    try:
        document = pypdfium2.PdfDocument(file)
    except pypdfium2.PdfiumError as error:
        if error.err_code in (raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY):
            refuse_encrypted()
        refuse_broken("it has no list of pages")
    with document:
        num_pages = len(document)
        if not num_pages:
            refuse_broken("it has no pages")
        limits.check_pages(num_pages)
        second = _SecondOpinion(file)
        lines: list[Line] = []
        extents: list[tuple[int | None, float, float]] = []  # no offset where there is no text
        length = 0
        for index in range(num_pages):
            found, width, height = _read_page(document, index, second)
            if found and lines:  # a blank line
                lines.append(("", _NOWHERE))
                length += 1
            extents.append((length if found else None, width, height))
            lines += found
            length += sum(len(text) + 1 for text, _ in found)
            limits.check_text(length)
            if on_progress:
                on_progress(index + 1, num_pages)
    if not lines:
        refuse_empty(
            "Its pages are pictures: run text recognition (OCR) on it and send the result."
        )
    text = "\n".join(line for line, _ in lines)
    pages: list[PageExtent] = []
    for start, width, height in reversed(extents):
        after = pages[-1].start if pages else len(text)
        pages.append(PageExtent(after if start is None else start, width, height))
    edges = array("i", (edge for _, line_edges in lines for edge in line_edges))
    return text, Layout.of(text, reversed(pages), edges)


def _read_page(
    document: Any, index: int, second: _SecondOpinion
) -> tuple[list[Line], float, float]:
    """Return a page's lines, its width and its height, both in points."""
    try:
        page = document[index]
        if document.get_formtype() != raw.FORMTYPE_NONE:  # what was filled in becomes page text
            raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
            page.close()
            page = document[index]
    except pypdfium2.PdfiumError:
        if (text := second.read(index)) is None:
            refuse_broken(f"page {index + 1} cannot be read")
        return _lines_without_place(text), 0.0, 0.0
    with_text = page.get_textpage()
    try:
        text = _characters(with_text)
        width, height = (round(min(side, _LARGEST), 1) for side in page.get_size())
        shown = (0, 0, round(width * TENTHS), round(height * TENTHS), 0)
        lines = [
            (line, _edges(page, shown, with_text, match.start(), len(match[0].rstrip())))
            for match in _LINE.finditer(text)
            if (line := _clean_line(match[0]))
        ]
        if (not lines or _UNKNOWN.search(text)) and (other := second.read(index)):
            lines = _lines_without_place(other) or lines
        return lines, width, height
    finally:
        with_text.close()
        page.close()


def _characters(page: Any) -> str:
    """Return one character for each of PDFium's, so that positions in both are the same."""
    text: str = page.get_text_range()
    num_chars = page.count_chars()
    last = raw.FPDFText_GetCharIndexFromTextIndex(page, num_chars - 1)
    if len(text) == num_chars and last == num_chars - 1:
        return text
    codes = (raw.FPDFText_GetUnicode(page, index) for index in range(num_chars))  # 3x as slow
    return "".join(
        _HYPHEN
        if code == _HYPHEN_CODE and raw.FPDFText_IsHyphen(page, index) == 1
        else "\uffff"
        if chr(code) == _HYPHEN  # what a font says for a character that it does not know
        else chr(code)
        for index, code in enumerate(codes)
    )


def _clean_line(text: str) -> str:
    """Return a line as text; PDFium gives UTF-16's halves of a character one by one."""
    whole = text.replace(_HYPHEN, "-").encode("utf-16-le", "surrogatepass")
    return clean_text(whole.decode("utf-16-le", "replace")).strip("\n").rstrip()


def _lines_without_place(text: str) -> list[Line]:
    return [(line, _NOWHERE) for each in text.split("\n") if (line := each.rstrip())]


def _edges(
    page: Any, shown: tuple[int, ...], with_text: Any, start: int, length: int
) -> tuple[int, int, int, int]:
    """Return the rectangle around characters on the page as it is `shown`, in its units."""
    num_rects = raw.FPDFText_CountRects(with_text, start, length)
    corners = [ctypes.c_double() for _ in range(4)]
    x, y = ctypes.c_int(), ctypes.c_int()
    xs, ys = [], []
    for index in range(num_rects):
        raw.FPDFText_GetRect(with_text, index, *corners)
        left, top, right, bottom = corners
        for across, up in ((left, top), (right, bottom)):
            raw.FPDF_PageToDevice(page, *shown, across, up, x, y)
            xs.append(x.value)
            ys.append(y.value)
    return (min(xs), min(ys), max(xs), max(ys)) if xs else _NOWHERE


class _SecondOpinion:
    """The same file as pypdf reads it, which is opened when a page is asked for."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._reader: PdfReader | None = None

    def read(self, index: int) -> str | None:
        """Return the text of a page; None where pypdf cannot read it either."""
        with suppress(Exception):  # of a broken file pypdf raises anything
            if self._reader is None:
                from pypdf import PdfReader  # takes .7 s, and few files need it

                self._reader = PdfReader(self._file)
            return clean_text(self._reader.pages[index].extract_text())
        return None
