"""Reading of an uploaded file in a process of its own, from the side of who wants the text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
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

_WORKER = ("-m", "library.parsing.worker")
_SUFFIX_CHARS = 16  # no known ending has more, and an argument may have 128 KiB
_SENSELESS = "its reader gave an answer without sense"
_CODES = get_args(UnreadableCode)
_ROOT = Path(library.__file__).parent.parent  # where -m finds it without an environment


async def parse_file(
    path: str | Path,
    filename: str,
    limits: ParsingLimits | None = None,
    on_progress: Progress | None = None,
) -> ParsedText:
    """Return a file's text, read by a process that can do little else (see `confinement`).

    The process gets the open file, the ending of its name and no environment. It is killed when
    it takes too long and when the caller is cancelled, and dies with the caller.

    Args:
        path: The file.
        filename: What its owner calls it.
        limits: What reading may cost.
        on_progress: Called now and then with the number of pages done and of pages.

    Raises:
        UnreadableFile: The file cannot be read, or not within the limits.
    """
    limits = limits or ParsingLimits()
    suffix = PurePath(filename).suffix[:_SUFFIX_CHARS]
    order = json.dumps({"suffix": suffix, "limits": asdict(limits)})
    with _open(path, limits) as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *_WORKER,
            order,
            stdin=file,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            cwd=_ROOT,
            start_new_session=True,  # Ctrl-C reaches the caller alone, which then kills it
        )
    try:
        assert process.stdout
        async with asyncio.timeout(limits.wall_s):
            try:
                return await _receive(process.stdout, limits, on_progress)
            except EOFError:  # it ended before its answer did
                _refuse_end(await process.wait(), limits)
    except TimeoutError:
        refuse_costly(f"{limits.wall_s:g} seconds")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # asyncio waits for ever behind a pipe that nobody reads


def _open(path: str | Path, limits: ParsingLimits) -> BinaryIO:
    file = open(path, "rb")  # noqa: SIM115 (the caller closes it)
    try:
        limits.check_size(os.fstat(file.fileno()).st_size)
    except UnreadableFile:
        file.close()
        raise
    return file


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
                } if (
                    media_type in MEDIA_TYPES
                    and 0 < text_bytes <= limits.text_bytes
                    and 0 < layout_bytes <= limits.layout_bytes
                ):
                    text = (await output.readexactly(text_bytes)).decode()
                    layout = Layout.unpack(await output.readexactly(layout_bytes))
                    return ParsedText(text, media_type, layout)
                case _:
                    refuse_broken(_SENSELESS)
        except (ValueError, asyncio.LimitOverrunError):  # of JSON, UTF-8, layouts; no line's end
            refuse_broken(_SENSELESS)
        if on_progress:
            on_progress(done, pages)


def _refuse_end(returncode: int, limits: ParsingLimits) -> NoReturn:
    """Refuse a file whose worker ended without an answer.

    Raises:
        RuntimeError: It failed as Python does: a mistake of the program or of its installation.
    """
    if returncode == 1:
        raise RuntimeError("The reader of files failed. Try `python -m library.parsing.worker`.")
    if returncode in (-signal.SIGKILL, -signal.SIGXCPU):  # by the kernel
        refuse_costly(f"{limits.cpu_s} seconds of computing or {limits.memory}")
    refuse_broken(f"it crashed its reader (code {returncode}), perhaps for want of {limits.memory}")
