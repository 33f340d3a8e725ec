"""Uploaded files as text that models read, with the way back to pages, lines and boxes.

A service has `FileReaders`, which reads each file in a process of its own; who trusts the files
calls `read_text`, or `read_files` for files and folders of this machine.
"""

from library.parsing.layout import Box, Layout, Location, PageExtent, ParsedText
from library.parsing.local_files import LocalFile, LocalFiles, read_files
from library.parsing.parsing_limits import ParsingLimits
from library.parsing.parsing_process import FileReaders
from library.parsing.reading import read_text
from library.parsing.unreadable_file import UnreadableCode, UnreadableFile

__all__ = [
    "Box",
    "FileReaders",
    "Layout",
    "LocalFile",
    "LocalFiles",
    "Location",
    "PageExtent",
    "ParsedText",
    "ParsingLimits",
    "UnreadableCode",
    "UnreadableFile",
    "read_files",
    "read_text",
]
