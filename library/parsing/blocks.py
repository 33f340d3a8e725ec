"""Text from a tree of elements: pieces make blocks, blocks make cells, cells make rows."""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["block", "item", "row"]

ITEM = "- "


class Blocks:
    """A text under construction, for formats that nest: tables in tables, lists in cells.

    Blocks are separated by blank lines, items of a list and rows of a table only by line ends. A
    row has `` | `` between its cells.

    Attributes:
        mark: What is written before the next block: ``- `` or a heading's signs.
    """

    def __init__(self) -> None:
        self.mark = ""
        self._pieces: list[str] = []
        self._frames: list[list[tuple[str, Kind]]] = [[]]

    def write(self, piece: str) -> None:
        """Add to the current block."""
        self._pieces.append(piece)

    def end_block(self, *, keep_spaces: bool = False) -> None:
        """End the current block, if it has text."""
        text = "".join(self._pieces)
        self._pieces.clear()
        if keep_spaces:
            text = text.strip("\n").rstrip()
        else:
            text = re.sub(" ?\n ?", "\n", re.sub(" +", " ", text)).strip()
        if text:
            self._frames[-1].append((self.mark + text, "item" if self.mark == ITEM else "block"))
            self.mark = ""

    def open_frame(self) -> None:
        """Begin a row or a cell."""
        self.end_block()
        self._frames.append([])

    def close_cell(self) -> None:
        """End a cell: its blocks become one line of the row."""
        text = " ".join(self._close_frame().split())
        self._frames[-1].append((text, "block"))

    def close_row(self) -> None:
        """End a row; one without text is dropped."""
        self.end_block()
        cells = [text for text, _ in self._frames.pop()]
        if any(cells):
            self._frames[-1].append((" | ".join(cells), "row"))

    def finish(self) -> str:
        """Return the text."""
        while len(self._frames) > 1:
            self.close_cell()
        return self._close_frame()

    def _close_frame(self) -> str:
        self.end_block()
        parts: list[str] = []
        before: Kind = "block"
        for text, kind in self._frames.pop():
            if text:
                parts += ("\n" if before == kind != "block" else "\n\n", text)
                before = kind
        return "".join(parts[1:])
