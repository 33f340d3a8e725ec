"""What reading one file may cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from library.parsing.unreadable_file import refuse_costly, refuse_empty

Progress = Callable[[int, int], None]  # pages done, pages


@dataclass(frozen=True, slots=True)
class ParsingLimits:
    """What reading one file may cost.

    Attributes:
        file_bytes: Size of the file.
        pages: Pages of a PDF.
        text_chars: Characters of the text.
        unpacked_bytes: What the parts of a DOCX file that hold text unpack to.
        memory_bytes: Address space of the process that reads; without a file it takes 80 MiB.
        cpu_s: Its seconds of computing.
        wall_s: Its seconds in all.
    """

    file_bytes: int = 512 << 20
    pages: int = 20_000
    text_chars: int = 20_000_000
    unpacked_bytes: int = 256 << 20
    memory_bytes: int = 1 << 30
    cpu_s: int = 300
    wall_s: float = 600.0

    def check_size(self, num_bytes: int) -> None:
        """Refuse a file by its size, before anything of it is read."""
        if not num_bytes:
            refuse_empty()
        if num_bytes > self.file_bytes:
            refuse_costly(f"{self.file_bytes} bytes", "file_too_large")

    def check_pages(self, num_pages: int) -> None:
        """Refuse a PDF by its number of pages."""
        if num_pages > self.pages:
            refuse_costly(f"{self.pages} pages")

    def check_text(self, num_chars: int) -> None:
        """Refuse a file by how much text it has."""
        if num_chars > self.text_chars:
            refuse_costly(f"{self.text_chars} characters of text")

    @property
    def text_bytes(self) -> int:
        """What a text within the limits takes in any encoding."""
        return 4 * self.text_chars

    @property
    def layout_bytes(self) -> int:
        """What the packed layout of a text within the limits takes."""
        return 16 + 12 * self.pages + 20 * (self.text_chars + 1)

    @property
    def memory(self) -> str:
        """The bound on memory in words."""
        return f"{self.memory_bytes >> 20} MiB of memory"
