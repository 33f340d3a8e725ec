"""The command ``rapid logs``: the output of this folder's server, or the logs of a pool."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.operating.log_lines import shorten
from deployments.cli.terminal import fail, note, out

_LOOK_S = 0.5  # between two looks for more lines


class GrowingFiles:
    """Text files that others append to, of which new ones may come."""

    def __init__(self, folder: Path, name: re.Pattern[str], num_last: int) -> None:
        """Begin with the last `num_last` lines of each file whose name matches."""
        self._folder, self._name, self._num_last = folder, name, num_last
        self._read_until: dict[Path, int] = {}

    def find(self) -> list[Path]:
        """Return the files that there are, the latest last."""
        found = [each for each in self._folder.iterdir() if self._name.fullmatch(each.name)]
        return sorted(found, key=lambda each: each.stat().st_mtime)

    def read_more(self) -> Iterator[str]:
        """Yield the lines that have been completed since the last call."""
        for path in self.find():
            is_new = path not in self._read_until
            start = self._read_until.get(path, 0)
            if path.stat().st_size < start:  # it was full, and begins anew
                start = 0
            with path.open("rb") as file:
                file.seek(start)
                content, end, _ = file.read().rpartition(b"\n")
            self._read_until[path] = start + len(content + end)
            lines = content.decode(errors="replace").split("\n") if end else []
            yield from lines[-self._num_last :] if is_new else lines


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines, until the server ends.")
    ] = False,
    pool: Annotated[
        str | None, typer.Option(help="The logs of one pool's replicas and engines, as target.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines of each.", min=1)] = 50,
) -> None:
    """Print the output of this folder's server, also of one that has ended.

    A line has its time, its part and its text. A pool's lines go to a file or a program as they
    are, with all their fields.
    """
    from deployments.cli.server.server_process import running_pid

    files = _find_files(pool, lines)
    is_whole = pool is not None and not out.is_terminal
    is_empty = True
    while True:
        is_over = not follow or running_pid() is None
        for line in files.read_more():
            typer.echo(line if is_whole else shorten(line))
            is_empty = False
        if is_over:
            break
        time.sleep(_LOOK_S)
    if is_empty:
        note("nothing is written yet; logging_config.log_level of the configuration says what is")


def _find_files(pool: str | None, num_last: int) -> GrowingFiles:
    from deployments.cli.server.server_process import LOG
    from deployments.cli.server.server_state import read_state

    if pool is None:
        if not LOG.exists():
            fail("no server was started from here: `rapid serve` starts one")
        return GrowingFiles(LOG.parent, re.compile(re.escape(LOG.name)), num_last)
    state = read_state()
    if state is None:
        fail("no server that was started from here runs, or its Ray is still starting")
    # Serve names them so: replica_APPLICATION_POOL_ID.log, and the engines' are beside them.
    name = re.compile(rf"replica_.*_{re.escape(pool)}_[^_]+(_engine)?\.log", re.IGNORECASE)
    folder = Path(state.session) / "logs" / "serve"
    if not folder.is_dir():
        fail(f"there is no {folder}: Serve has not started on this machine")
    files = GrowingFiles(folder, name, num_last)
    if not files.find():
        fail(f"no pool {pool!r} has a log on this machine; there are {', '.join(state.pools)}")
    return files
