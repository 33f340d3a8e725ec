"""The start of a process that holds a part of a model, on the machine of whoever starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Protocol


class Process(Protocol):
    """What holds a part of a model, or several of them: they end together."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait for its end, or raise subprocess.TimeoutExpired after so many seconds."""

    def kill(self) -> None:
        """End it, whatever it does."""


Started = tuple[Process, Connection]


def start_here() -> Started:
    """Start a process; return it with the pipe through which it takes orders."""
    ours, theirs = Pipe()
    return start_process(theirs), ours


def start_process(pipe: Connection) -> subprocess.Popen[bytes]:
    """Start a process that takes orders from a connection, and ends with the calling thread."""
    paths: Sequence[str] = [path or os.getcwd() for path in sys.path]
    process = subprocess.Popen(
        [sys.executable, "-m", "rapid.engines.parallel.follower", str(pipe.fileno())],
        pass_fds=[pipe.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the first rank, whose end they follow
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    pipe.close()
    return process
