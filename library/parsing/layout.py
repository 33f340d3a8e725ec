"""A parsed text and its layout: which page, line and box a span of the text stands in."""

from __future__ import annotations

import re
import struct
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import sub
from typing import Self

_HEADER = struct.Struct("<4sIII")  # format, pages, lines, lines that have a box
_FORMAT = b"lay1"
TENTHS = 10  # parts of a point: 1/100 inch is finer than any line of text


@dataclass(frozen=True, slots=True)
class PageExtent:
    """A page: the offset of its text, and its size in points as it is shown."""

    start: int
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle on a page, in points from the upper left corner of the page as it is shown."""

    page: int
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Location:
    """Where a span of the text stands in its file.

    Attributes:
        pages: The page numbers from 1; none where the file has no pages.
        lines: The line numbers from 1 in the whole text; for plain text those of the file.
        boxes: One box for each line on a page whose place is known, in the text's order.
    """

    pages: range
    lines: range
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The pages and lines of a text.

    Attributes:
        pages: The pages in order. A page without text starts where the next one does.
        line_starts: The offset of each line.
        edges: Four numbers per line in tenths of a point: left, top, right, bottom on its page;
            all 0 where unknown. Empty for a file without pages.
    """

    pages: tuple[PageExtent, ...]
    line_starts: array[int]
    edges: array[int]

    @classmethod
    def of(
        cls, text: str, pages: Iterable[PageExtent] = (), edges: array[int] | None = None
    ) -> Self:
        """Return the layout of a text, of which `edges` are the lines' boxes."""
        starts = array("I", chain((0,), (match.end() for match in re.finditer("\n", text))))
        edges = array("i") if edges is None else edges
        assert len(edges) in (0, 4 * len(starts))
        return cls(tuple(pages), starts, edges)

    def locate(self, start: int, end: int) -> Location:
        """Return where the characters from `start` until before `end` stand."""
        last = max(start, end - 1)
        lines = range(self._line_of(start), self._line_of(last) + 1)
        pages = range(self._page_of(start), self._page_of(last) + 1) if self.pages else range(0)
        boxes = (self._box(line) for line in lines) if self.edges else ()
        return Location(pages, lines, tuple(box for box in boxes if box))

    def _line_of(self, offset: int) -> int:
        return bisect_right(self.line_starts, offset)

    def _page_of(self, offset: int) -> int:
        return bisect_right(self.pages, offset, key=lambda page: page.start)

    def _box(self, line: int) -> Box | None:
        edges = self.edges[4 * line - 4 : 4 * line]
        page = self._page_of(self.line_starts[line - 1])
        return Box(page, *(edge / TENTHS for edge in edges)) if any(edges) else None

    def pack(self) -> bytes:
        """Return the layout as columns of numbers, whose size bounds what `unpack` allocates."""
        columns = [
            _differences([page.start for page in self.pages]),
            array("i", (round(page.width * TENTHS) for page in self.pages)),
            array("i", (round(page.height * TENTHS) for page in self.pages)),
            _differences(self.line_starts),
            *(self.edges[edge::4] for edge in range(4)),
        ]
        boxed = len(self.edges) // 4
        header = _HEADER.pack(_FORMAT, len(self.pages), len(self.line_starts), boxed)
        return header + b"".join(_little_endian(column).tobytes() for column in columns)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the layout that `pack` wrote.

        Raises:
            ValueError: These are not bytes of `pack`, whoever wrote them.
        """
        if len(data) < _HEADER.size:
            raise ValueError("A layout is shorter than its header.")
        form, num_pages, num_lines, boxed = _HEADER.unpack_from(data)
        lengths = [num_pages] * 3 + [num_lines] + [boxed] * 4
        if (
            form != _FORMAT
            or boxed not in (0, num_lines)
            or len(data) != _HEADER.size + 4 * sum(lengths)
        ):
            raise ValueError("A layout does not have the form of this version.")
        columns = []
        for length, end in zip(lengths, accumulate(lengths), strict=True):
            column = array("i")
            column.frombytes(data[_HEADER.size + 4 * (end - length) : _HEADER.size + 4 * end])
            columns.append(_little_endian(column))
        page_steps, widths, heights, line_steps, *sides = columns
        if any(step < 0 for step in chain(page_steps, line_steps)) or any(
            steps[:1] not in (array("i"), array("i", [0])) for steps in (page_steps, line_steps)
        ):
            raise ValueError("A layout's offsets do not rise from 0.")
        pages = (
            PageExtent(start, width / TENTHS, height / TENTHS)
            for start, width, height in zip(accumulate(page_steps), widths, heights, strict=True)
        )
        edges = array("i", chain.from_iterable(zip(*sides, strict=True)))
        try:
            return cls(tuple(pages), array("I", accumulate(line_steps)), edges)
        except OverflowError as error:
            raise ValueError("A layout's offsets are too large.") from error

    def to_bytes(self) -> bytes:
        """Return the layout in a compact form, to be stored."""
        return zlib.compress(self.pack())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the layout that `to_bytes` wrote."""
        return cls.unpack(zlib.decompress(data))


@dataclass(frozen=True, slots=True)
class ParsedText:
    """A file's text.

    Attributes:
        text: What a model reads. Lines end in a line feed; it has no control character but
            tabs, and no surrogate. All offsets count its characters, as Python does.
        media_type: What the file was, such as ``application/pdf``.
        layout: The way from offsets to pages, lines and boxes.
        guessed: The encoding that a plain text was taken for, such as ``cp1252``; None where it is
            UTF-8 or says itself what it is.
    """

    text: str
    media_type: str
    layout: Layout
    guessed: str | None = None


def _differences(offsets: Sequence[int]) -> array[int]:
    """Return the first offset and the steps between offsets, which compress better."""
    return array("i", chain(offsets[:1], map(sub, offsets[1:], offsets)))


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
