"""Reading of bytes as the file that they would be."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from library.parsing import ParsedText, ParsingLimits, UnreadableFile, read_text


def read(data: bytes, name: str, limits: ParsingLimits | None = None) -> ParsedText:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "blob")
        path.write_bytes(data)
        return read_text(path, name, limits)


def refuse(data: bytes, name: str, limits: ParsingLimits | None = None) -> tuple[str, str]:
    """Return the code and the message with which a file is refused."""
    with pytest.raises(UnreadableFile) as caught:
        read(data, name, limits)
    assert caught.value.code
    return caught.value.code, str(caught.value)
