"""A file as text: what kind it is, and how much of it is read."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from typing import BinaryIO, Literal, NoReturn

from library.parsing.layout import Layout, ParsedText
from library.parsing.parsing_limits import ParsingLimits, Progress
from library.parsing.plain_text import decode_text
from library.parsing.unreadable_file import (
    UnreadableFile,
    refuse_broken,
    refuse_empty,
    refuse_encrypted,
    refuse_kind,
)

Kind = Literal["text", "markdown", "html", "pdf", "docx"]

_MEDIA_TYPES: dict[Kind, str] = {
    "text": "text/plain",
    "markdown": "text/markdown",
    "html": "text/html",
    "pdf": "application/pdf",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
}
_BY_NAME: dict[str, Kind] = {
    **dict.fromkeys((".md", ".markdown", ".mdown"), "markdown"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    ".txt": "text",
}
MEDIA_TYPES = frozenset(_MEDIA_TYPES.values())

_HEAD_BYTES = 1024  # within them readers of PDF look for its first line
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # old Office files, and encrypted new ones
_HTML = re.compile(
    rb"(?:\xef\xbb\xbf)?(?>\s|<\?xml[^>]*>|<!--.*?-->)*+<(?:!doctype\s+html|html)\b",
    re.IGNORECASE | re.DOTALL,
)


def read_text(
    path: str | Path,
    filename: str,
    limits: ParsingLimits | None = None,
    on_progress: Progress | None = None,
) -> ParsedText:
    """Return a file's text, read in this process: for files that are trusted.

    Args:
        path: The file.
        filename: What its owner calls it; only the ending counts, and only where the content does
            not say what it is.
        limits: Those of bytes, pages and characters hold here.
        on_progress: Called after each page of a PDF.

    Raises:
        UnreadableFile: The file cannot be read.
    """
    with open(path, "rb") as file:
        return read_file(file, PurePath(filename).suffix, limits or ParsingLimits(), on_progress)


_PICTURES = (".svg",)  # text by its bytes, and nothing to read


def is_readable(path: Path) -> bool:
    """Return whether the first bytes of a file are those of a kind that is read."""
    if path.suffix.lower() in _PICTURES:
        return False
    with open(path, "rb") as file:
        try:
            if _find_kind(file, path.suffix.lower()) in ("pdf", "docx"):
                return True
            decode_text(file.read(_HEAD_BYTES))
        except UnreadableFile as error:
            return error.code != "unsupported_file"
    return True


def read_file(
    file: BinaryIO, suffix: str, limits: ParsingLimits, on_progress: Progress | None = None
) -> ParsedText:
    """Return an open file's text; see `read_text`. `on_progress` is called after each page."""
    limits.check_size(os.fstat(file.fileno()).st_size)
    kind = _find_kind(file, suffix.lower())
    try:
        text, layout, guessed = _read(file, kind, limits, on_progress)
    except (UnreadableFile, MemoryError, ImportError):  # which are not the file's fault
        raise
    except Exception as error:
        refuse_broken(f"it could not be read as {_MEDIA_TYPES[kind]} ({type(error).__name__})")
    if not text.strip():
        refuse_empty()
    limits.check_text(len(text))
    return ParsedText(text, _MEDIA_TYPES[kind], layout or Layout.of(text), guessed)


def _read(
    file: BinaryIO, kind: Kind, limits: ParsingLimits, on_progress: Progress | None
) -> tuple[str, Layout | None, str | None]:
    if kind == "pdf":
        from library.parsing.pdf_text import read_pdf  # each reader's library only where it is used

        return *read_pdf(file, limits, on_progress), None
    if kind == "docx":
        from library.parsing.docx_text import read_docx

        return read_docx(file, limits), None, None
    data = file.read(limits.text_bytes + 4)
    limits.check_text(len(data) // 4)
    if kind == "html":
        from library.parsing.html_text import read_html

        return read_html(data), None, None
    text, guessed = decode_text(data)
    return text, None, guessed


def _find_kind(file: BinaryIO, suffix: str) -> Kind:
    """Return what a file is: by its first bytes, or by its name where they are those of text."""
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    if head.startswith(b"%PDF-") or (suffix == ".pdf" and b"%PDF-" in head):
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return "docx"
    if head.startswith(_OLE):
        _refuse_old_office(file)
    if head.startswith((b"{\\rtf", b"%!PS")):
        refuse_kind("Save it as DOCX or PDF and send that.")
    if suffix in (".pdf", ".docx"):
        refuse_broken(f"it is named {suffix} but is no such file")
    return _BY_NAME.get(suffix) or ("html" if _HTML.match(head) else "text")


def _refuse_old_office(file: BinaryIO) -> NoReturn:
    head = file.read(1 << 20)  # the directory stands before a small file's content, or at its end
    file.seek(max(len(head), os.fstat(file.fileno()).st_size - len(head)))
    if "EncryptedPackage".encode("utf-16-le") in head + file.read():
        refuse_encrypted()
    refuse_kind("Save it as DOCX and send that.")
