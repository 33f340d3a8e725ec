"""Reading of an uploaded file in a process of its own, from the side of who wants the text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import BinaryIO, cast, get_args

import library
from library.parsing.layout import ParsedText, TextLayout
from library.parsing.parsing_limits import ParsingLimits, Progress
from library.parsing.reading import MEDIA_TYPES
from library.parsing.unreadable_file import UnreadableCode, UnreadableFile

_WORKER = ("-m", "library.parsing.worker")
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
    order = json.dumps({"suffix": PurePath(filename).suffix, "limits": asdict(limits)})
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
                raise _explain(await process.wait(), limits) from None
    except TimeoutError:
        raise limits.exceed(f"{limits.wall_s:g} seconds") from None
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
                    layout = TextLayout.unpack(await output.readexactly(layout_bytes))
                    return ParsedText(text, media_type, layout)
                case _:
                    raise _crash("it gave an answer without sense")
        except (ValueError, asyncio.LimitOverrunError):  # of JSON, UTF-8, layouts; no line's end
            raise _crash("it gave an answer without sense") from None
        if on_progress:
            on_progress(done, pages)


def _explain(returncode: int, limits: ParsingLimits) -> UnreadableFile:
    """Return the error of a worker that ended without an answer."""
    if returncode in (-signal.SIGKILL, -signal.SIGXCPU):  # by the kernel
        return limits.exceed(f"{limits.cpu_s} seconds of computing or {limits.memory}")
    return _crash(f"it ended with code {returncode}, perhaps for want of {limits.memory}")


def _crash(how: str) -> UnreadableFile:
    return UnreadableFile(
        f"The file is broken: it crashed its reader ({how}). Open it in its program, save it "
        "again and send that.",
        "broken_file",
    )
