"""A Qdrant in a process of its own, which is stopped, started and emptied by lines of its input.

    python -m tests.faults.qdrant 127.0.0.1

It prints its URL, then a line for each line that it has obeyed. See `RestQdrant` for what it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.retrieval.rest_server import RestQdrant


class Qdrant:
    """The caller's end of such a process.

    Attributes:
        url: Where it listens while it is started.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = self._told()
        self._is_stopped = False

    def start(self) -> None:
        """Listen again, with what is stored."""
        if self._is_stopped:
            self._do("start")
            self._is_stopped = False

    def stop(self) -> None:
        """Refuse connections."""
        self._do("stop")
        self._is_stopped = True

    def empty(self) -> None:
        """Lose everything."""
        self._do("empty")

    def _do(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        assert self._told() == order

    def _told(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def qdrant(host: str = "127.0.0.1") -> Iterator[Qdrant]:
    """Run the process while the context lasts."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.qdrant", host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Qdrant(process)
        finally:
            process.kill()


def main() -> None:
    server = RestQdrant(sys.argv[1])
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = line.strip()
        {"start": server.start, "stop": server.stop, "empty": server.empty}[order]()
        sys.stdout.write(f"{order}\n")
        sys.stdout.flush()
    os._exit(0)  # the caller is gone, and the server's thread would go on


if __name__ == "__main__":
    main()
