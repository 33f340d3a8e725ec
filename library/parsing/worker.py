"""The process that reads uploaded files: ``python -m library.parsing.worker``.

It forks a process for each file, so that none has to start Python (.2 s), and each has its own
limits and end. It reads no file itself, so that no file's process has anything of another file. Its
standard input is a socket. An order there is its length in four bytes, which come with three open
files: the uploaded one, a pipe for the answer, and a socket; then JSON: the name's ending and the
limits. When the caller shuts that socket down the file's process is killed; when the process has
ended its return code is written there.

A file's process writes lines of JSON to the pipe: ``{"done": pages, "pages": pages}`` now and then,
and last ``{"code": ..., "message": ...}`` or a `Result`, after which follow the text in UTF-8 and
the packed layout. Its reader trusts none of it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

import charset_normalizer  # noqa: F401 (so that no file's process has to load it)
import lxml.html  # noqa: F401

from library.parsing.confinement import confine
from library.parsing.layout import ParsedText
from library.parsing.parsing_limits import ParsingLimits, Progress
from library.parsing.reading import read_file
from library.parsing.unreadable_file import UnreadableFile, refuse_costly

LENGTH = struct.Struct("I")
"""The length of an order, in bytes."""

_NUM_FILES = 3  # that come with an order
_MOST_FILES = 1024  # numbers of open files are below it: callers read a few files at once
_MESSAGES = 100  # of progress, at most: one for each page would cost more than a page of pictures

Read = Callable[[BinaryIO, str, ParsingLimits, Progress], ParsedText]


def main(read: Read = read_file) -> None:
    """Fork a process for each order, until the caller closes the socket or dies."""
    orders = socket.socket(fileno=0)
    ended, tells_end = os.pipe()
    os.set_blocking(tells_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is told
    signal.set_wakeup_fd(tells_end)
    callers: dict[int, socket.socket] = {}  # by the process that reads their file
    with selectors.DefaultSelector() as waiting:
        waiting.register(orders, selectors.EVENT_READ)
        waiting.register(ended, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is orders:
                    length, files, _, _ = socket.recv_fds(orders, LENGTH.size, _NUM_FILES)
                    if not length:
                        for pid in callers:
                            os.kill(pid, signal.SIGKILL)
                        return
                    order = json.loads(_receive_order(orders, length))
                    if not (pid := os.fork()):
                        _become_reader(files, order, read)
                    os.close(files[0])
                    os.close(files[1])
                    callers[pid] = socket.socket(fileno=files[2])
                    waiting.register(callers[pid], selectors.EVENT_READ, pid)
                elif key.fileobj == ended:
                    os.read(ended, _MOST_FILES)
                    _tell_ends(callers, waiting)
                elif key.data in callers:
                    os.kill(key.data, signal.SIGKILL)  # not waited for yet, so still its number


def _receive_order(orders: socket.socket, length: bytes) -> bytes:
    return orders.recv(LENGTH.unpack(length)[0], socket.MSG_WAITALL)


def _tell_ends(callers: dict[int, socket.socket], waiting: selectors.BaseSelector) -> None:
    """Tell the callers of processes that have ended how they did."""
    while callers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with callers.pop(pid) as caller, suppress(OSError):  # who may be gone
            waiting.unregister(caller)
            caller.send(b"%d" % os.waitstatus_to_exitcode(status))


def _become_reader(files: Sequence[int], order: dict[str, Any], read: Read) -> NoReturn:
    """Read the file in this process, which is new, and end it as Python would."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        os.dup2(files[0], 0)
        os.dup2(files[1], 1)
        os.closerange(3, _MOST_FILES)
        _read_one(ParsingLimits(**order["limits"]), order["suffix"], read)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def _read_one(limits: ParsingLimits, suffix: str, read: Read) -> None:
    """Read the file that is standard input, confined."""
    with open(os.dup(1), "wb") as output, open(0, "rb", closefd=False) as file:
        os.dup2(2, 1)  # no library writes between the messages

        def send(**message: Any) -> None:
            output.write(json.dumps(message).encode() + b"\n")
            output.flush()

        def report(done: int, pages: int) -> None:
            if done % -(-pages // _MESSAGES) == 0:
                send(done=done, pages=pages)

        try:
            confine(limits)
            try:
                parsed = read(file, suffix, limits, report)
                text, layout = parsed.text.encode(), parsed.layout.pack()
            except MemoryError:
                refuse_costly(limits.memory)
        except UnreadableFile as error:
            send(code=error.code, message=str(error))
        else:
            sizes = {"text_bytes": len(text), "layout_bytes": len(layout)}
            send(media_type=parsed.media_type, guessed=parsed.guessed, **sizes)
            output.write(text + layout)


if __name__ == "__main__":
    main()
