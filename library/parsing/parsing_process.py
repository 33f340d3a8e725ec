"""Reading of an uploaded file in a process of its own, from the side of who wants the text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import BinaryIO, NoReturn, cast, get_args

import library
from library.parsing.layout import Layout, ParsedText
from library.parsing.parsing_limits import ParsingLimits, Progress
from library.parsing.reading import MEDIA_TYPES
from library.parsing.unreadable_file import (
    UnreadableCode,
    UnreadableFile,
    refuse_broken,
    refuse_costly,
)
from library.parsing.worker import LENGTH

_WORKER = ("-m", "library.parsing.worker")
_SUFFIX_CHARS = 16  # no known ending has more, and an argument may have 128 KiB
_FAILED = "The reader of files failed. Try `python -m library.parsing.worker < /dev/null`."
_SENSELESS = "its reader gave an answer without sense"
_CODES = get_args(UnreadableCode)
_ROOT = Path(library.__file__).parent.parent  # where -m finds it without an environment


class FileReaders:
    """Processes that read one file each, forked by one that is started when it is first needed.

    A file's process can do little else (see `confinement`): it gets the open file, the ending of
    its name and no environment. It is killed when it takes too long and when its caller is
    cancelled, and dies with the caller.
    """

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None

    async def parse_file(
        self,
        file: BinaryIO,
        filename: str,
        limits: ParsingLimits | None = None,
        on_progress: Progress | None = None,
    ) -> ParsedText:
        """Return a file's text.

        Args:
            file: The file; it is read from where it stands.
            filename: What its owner calls it.
            limits: What reading may cost.
            on_progress: Called now and then with the number of pages done and of pages.

        Raises:
            UnreadableFile: The file cannot be read, or not within the limits.
        """
        limits = limits or ParsingLimits()
        suffix = PurePath(filename).suffix[:_SUFFIX_CHARS]
        order = json.dumps({"suffix": suffix, "limits": asdict(limits)}).encode()
        answer, answers = os.pipe()
        control, controls = socket.socketpair()
        try:
            limits.check_size(os.fstat(file.fileno()).st_size)
            self._send(order, [file.fileno(), answers, controls.fileno()])
        except BaseException:
            os.close(answer)
            control.close()
            raise
        finally:
            os.close(answers)
            controls.close()
        output = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(answer, "rb", buffering=0)
        )
        ends, controller = await asyncio.open_connection(sock=control)
        try:
            async with asyncio.timeout(limits.wall_s):
                try:
                    return await _receive(output, limits, on_progress)
                except EOFError:  # it ended before its answer did
                    _refuse_end(await ends.read(), limits)
        except TimeoutError:
            refuse_costly(f"{limits.wall_s:g} seconds")
        finally:
            pipe.close()
            controller.write_eof()  # so that it is killed if it has not ended
            await ends.read()
            controller.close()

    def _send(self, order: bytes, files: Sequence[int]) -> None:
        """Send an order with its open files; a process that has died is started again."""
        for _ in range(2):
            if self._worker is None or self._worker.poll() is not None:
                self.close()
                self._start()
            assert self._orders is not None
            try:
                socket.send_fds(self._orders, [LENGTH.pack(len(order))], files)
                self._orders.sendall(order)
                return
            except OSError:
                self.close()
        raise RuntimeError(_FAILED)

    def _start(self) -> None:
        self._orders, orders = socket.socketpair()
        with orders:
            self._worker = subprocess.Popen(
                [sys.executable, *_WORKER],
                stdin=orders.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd=_ROOT,
                start_new_session=True,  # Ctrl-C reaches the caller alone
            )

    def close(self) -> None:
        """End all processes; the next file starts them again."""
        if self._orders is not None and self._worker is not None:
            self._orders.close()
            self._worker.wait()  # it ends when it sees that, within milliseconds
        self._orders = self._worker = None


async def _receive(
    output: asyncio.StreamReader, limits: ParsingLimits, on_progress: Progress | None
) -> ParsedText:
    """Return what the worker read, checking all that it says: its file may have taken it over.

    Raises:
        EOFError: It ended before.
    """
    while True:
        try:
            match json.loads(await output.readuntil()):
                case {"done": int(done), "pages": int(pages)}:
                    pass
                case {"code": str(code), "message": str(message)} if code in _CODES:
                    raise UnreadableFile(message, cast(UnreadableCode, code))
                case {
                    "media_type": str(media_type),
                    "text_bytes": int(text_bytes),
                    "layout_bytes": int(layout_bytes),
                    "guessed": (str() | None) as guessed,
                } if (
                    media_type in MEDIA_TYPES
                    and 0 < text_bytes <= limits.text_bytes
                    and 0 < layout_bytes <= limits.layout_bytes
                ):
                    text = (await output.readexactly(text_bytes)).decode()
                    layout = Layout.unpack(await output.readexactly(layout_bytes))
                    return ParsedText(text, media_type, layout, guessed)
                case _:
                    refuse_broken(_SENSELESS)
        except (ValueError, asyncio.LimitOverrunError):  # of JSON, UTF-8, layouts; no line's end
            refuse_broken(_SENSELESS)
        if on_progress:
            on_progress(done, pages)


def _refuse_end(told: bytes, limits: ParsingLimits) -> NoReturn:
    """Refuse a file whose process ended without an answer, with this return code.

    Raises:
        RuntimeError: It failed as Python does: a mistake of the program or of its installation.
    """
    if told in (b"", b"1"):
        raise RuntimeError(_FAILED)
    returncode = int(told)
    if returncode in (-signal.SIGKILL, -signal.SIGXCPU):  # by the kernel
        refuse_costly(f"{limits.cpu_s} seconds of computing or {limits.memory}")
    refuse_broken(f"it crashed its reader (code {returncode}), perhaps for want of {limits.memory}")
