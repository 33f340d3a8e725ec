"""The text of a DOCX file: paragraphs, headings, lists, tables and notes in order.

Read with zipfile and lxml: python-docx drops content controls, tracked insertions and text boxes,
refuses strict files, and unpacks every picture.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from lxml import etree

from library.parsing.blocks import ITEM, Blocks
from library.parsing.parsing_limits import ParsingLimits
from library.parsing.unreadable_file import (
    refuse_broken,
    refuse_costly,
    refuse_encrypted,
    refuse_kind,
)

_MAIN = re.compile(r"wordprocessingml\.document\.main|ms-word\..*main")
_NOTES = re.compile(r"wordprocessingml\.(footnotes|endnotes)\+xml")
_STYLES = re.compile(r"wordprocessingml\.styles\+xml")
_TYPES = "[Content_Types].xml"
_UNSEEN = {"Fallback", "moveFrom"}  # said twice: in its alternative, and where it was moved to
_SPECIAL = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


def read_docx(file: BinaryIO, limits: ParsingLimits) -> str:
    """Return the text of a DOCX file within the limit of what its text parts unpack to."""
    with zipfile.ZipFile(file) as archive:
        if any(info.flag_bits & 1 for info in archive.infolist()):
            refuse_encrypted()
        if _TYPES not in archive.namelist():
            refuse_kind()
        room = _Parts(archive, limits.unpacked_bytes)
        types = {
            element.get("PartName", "").lstrip("/"): element.get("ContentType", "")
            for event, element in room.walk(_TYPES)
            if event == "end"
        }
        main, notes, styles = (
            sorted(name for name, kind in types.items() if kinds.search(kind))
            for kinds in (_MAIN, _NOTES, _STYLES)
        )
        if not main:  # a spreadsheet or slides, for example
            refuse_kind()
        marks = {id_: mark for name in styles for id_, mark in _find_marks(room.walk(name))}
        blocks = Blocks()
        for name in (*main, *notes):
            _read_part(room.walk(name), marks, blocks)
        return blocks.finish()


class _Parts:
    """The parts of an archive, which together may unpack to a number of bytes."""

    def __init__(self, archive: zipfile.ZipFile, unpacked_bytes: int) -> None:
        self._archive = archive
        self._bytes = self._left = unpacked_bytes

    def walk(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the start and the end of each element of a part; what ended is forgotten.

        zipfile never unpacks more of a part than its entry says.
        """
        info = self._archive.getinfo(name)
        self._left -= info.file_size
        if self._left < 0:
            refuse_costly(f"{self._bytes} bytes unpacked", "file_too_large")
        with self._archive.open(info) as part:
            walk = etree.iterparse(
                part, ("start", "end"), resolve_entities=False, no_network=True, load_dtd=False
            )
            for number, (event, element) in enumerate(walk):
                if number == 0 and element.getroottree().docinfo.internalDTD is not None:
                    refuse_broken("it declares XML entities, which DOCX forbids")
                yield event, element
                if event == "end" and _name(element) in ("p", "tr", "style", "Override"):
                    element.clear()


def _name(element: Any) -> str:
    return etree.QName(element).localname if isinstance(element.tag, str) else ""


def _value(element: Any, name: str) -> str:
    """Return an attribute of any namespace: strict files have others."""
    return next((value for key, value in element.items() if key.rpartition("}")[2] == name), "")


def _find_marks(walk: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the ids of styles of headings and lists with their marks.

    The ids are in the language of the program that wrote the file, the names are English.
    """
    style = ""
    for event, element in walk:
        match _name(element):
            case "style" if event == "start":
                style = _value(element, "styleId")
            case "name" if event == "end":
                name = _value(element, "val").lower()
                if heading := re.fullmatch(r"heading ([1-6])|title", name):
                    yield style, "#" * int(heading[1] or 1) + " "
                elif re.match("list (bullet|number)", name):
                    yield style, ITEM


def _read_part(walk: Iterator[tuple[str, Any]], style_marks: dict[str, str], to: Blocks) -> None:
    num_unseen = 0
    for event, element in walk:
        name = _name(element)
        if name in _UNSEEN:
            num_unseen += 1 if event == "start" else -1
        elif num_unseen:
            continue
        elif event == "start":
            if name == "p":  # inside another one in a text box
                to.end_block(keep_spaces=True)
            elif name in ("tr", "tc"):
                to.open_frame()
        else:
            match name:
                case "t":
                    to.write(element.text or "")
                case "pStyle":
                    to.mark = style_marks.get(_value(element, "val"), "")
                case "numPr":
                    to.mark = to.mark or ITEM
                case "tc":
                    to.close_cell()
                case "tr":
                    to.close_row()
                case "p":
                    to.end_block(keep_spaces=True)
                    to.mark = ""
                case _ if name in _SPECIAL and _name(element.getparent()) == "r":
                    to.write(_SPECIAL[name])
