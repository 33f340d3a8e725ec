"""A gigabyte of files of all kinds, and one of 2,000 pages, within the memory of each process."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from library.library_config import LibraryConfig
from tests.library.parsing.small_pdf import write_pdf
from tests.library.parsing.test_docx import pack
from tests.library.serve_library import start_server
from tests.ports import free_port

MIB = 2**20
SERVER_GROWS = 256 * MIB  # half of it the layout of 2,000 pages: 20 bytes a character
READER_TAKES = 1024 * MIB  # the default of `library.parsing_bytes`


def pdf(size: int) -> bytes:
    """A page of text, with something large attached that no page shows."""
    page = write_pdf([[(72, 700, "The code is 4711.")]])
    return page + b"\n%" + os.urandom(size).translate(bytes(range(256)), b"\r\n")


def docx(size: int) -> bytes:
    """A paragraph, beside a picture."""
    body = "<w:p><w:r><w:t>The code is 4711.</w:t></w:r></w:p>"
    return pack(body, extra={"word/media/image1.png": os.urandom(size)})


def html(size: int) -> bytes:
    picture = base64.b64encode(os.urandom(size * 3 // 4)).decode()
    return f'<p>The code is 4711.</p><img src="data:image/png;base64,{picture}">'.encode()


def text(size: int) -> bytes:
    return b"The code is 4711. The rent is due on the first day of each month.\n" * (size // 66)


def long_pdf(num_pages: int) -> bytes:
    """Pages of fifty lines each."""
    line = "The rent of page {} is due on the first day of each month, line {}."
    return write_pdf(
        [
            [(50, 770 - 14 * number, line.format(page, number)) for number in range(50)]
            for page in range(num_pages)
        ]
    )


KINDS: dict[str, tuple[Callable[[int], bytes], int, int]] = {
    "pdf": (pdf, 64 * MIB, 8),
    "docx": (docx, 32 * MIB, 8),
    "html": (html, 16 * MIB, 12),
    "txt": (text, 8 * MIB, 8),
}


class Memory(threading.Thread):
    """Samples the memory of a process, and of all that it started; bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._server, self._ends = psutil.Process(pid), threading.Event()
        self.before = self.most = self._server.memory_info().rss
        self.most_of_a_reader = 0

    def run(self) -> None:
        while not self._ends.wait(0.05):
            self.most = max(self.most, self._server.memory_info().rss)
            for child in self._server.children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    rss = child.memory_info().rss
                    self.most_of_a_reader = max(self.most_of_a_reader, rss)

    def end(self) -> None:
        self._ends.set()
        self.join()


@pytest.mark.slow
async def test_a_gigabyte_of_files_is_read_within_the_memory_of_each_process(tmp_path: Path):
    config = LibraryConfig(folder=tmp_path)
    port = free_port()
    server = await asyncio.to_thread(start_server, config, port)
    try:
        memory = Memory(server.pid)
        memory.start()
        sent = 0
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as http:
            ids = [await _upload(http, "2,000 pages.pdf", long_pdf(2_000))]
            for kind, (write, size, number) in KINDS.items():
                for index in range(number):
                    content = write(size)
                    sent += len(content)
                    ids.append(await _upload(http, f"{index}.{kind}", content))
            for file_id in ids:
                while (file := await _get(http, file_id))["status"] == "uploaded":  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                assert file["status"] == "processed", file
        memory.end()
        assert sent > 1e9
        assert memory.most - memory.before < SERVER_GROWS
        assert 0 < memory.most_of_a_reader < READER_TAKES
    finally:
        server.kill()
        server.wait()


async def _upload(http: httpx.AsyncClient, name: str, content: bytes) -> str:
    form = {"purpose": (None, "user_data"), "file": (name, io.BytesIO(content))}
    return str((await http.post("/v1/files", files=form)).raise_for_status().json()["id"])


async def _get(http: httpx.AsyncClient, file_id: str) -> dict[str, Any]:
    return dict((await http.get(f"/v1/files/{file_id}")).json())
