"""Output of the commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from rapid.ports import Clock

DEFAULT_URL = "http://127.0.0.1:8000"
USAGE = 2  # exit status where what was typed is wrong, as Click's own

_STEERING = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f]")  # all controls but line ends and tabs
_LOG_S = 15.0  # between two lines about one wait in a log

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

out = Console()
err = Console(stderr=True)


def fail(message: str, status: int = 1) -> NoReturn:
    """Print an error that says what to do, and end the command with this exit status."""
    said = escape(_drop_controls(message))
    err.print(f"[bold red]error:[/] {said}", soft_wrap=True, highlight=False)
    raise typer.Exit(status)


def note(message: str) -> None:
    """Print a message that is not part of the result, on standard error."""
    err.print(f"[dim]{escape(_drop_controls(message))}[/]", soft_wrap=True, highlight=False)


def print_json(value: Any) -> None:
    """Print a result for programs, on standard output; its control characters are escaped."""
    written = json.dumps(value, ensure_ascii=False, indent=1)  # which leaves those from 127 on
    typer.echo(re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", written))


def print_text(text: str, *, ends_line: bool = True) -> None:
    """Print a text of a model or of a document, without what would steer a terminal.

    It is dropped from files too, as they are shown on terminals later; JSON has every character.
    """
    typer.echo(_drop_controls(text), nl=ends_line)


def _drop_controls(text: str) -> str:
    return _STEERING.sub("", text)


def say(message: str) -> None:
    """Print a paragraph of the result, which the terminal wraps."""
    out.print(message, highlight=False, soft_wrap=True)


def make_title_table() -> Table:
    """Return an empty table for rows of a title and a text."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


class Waiting:
    """What a command waits for, shown on standard error until it stops.

    A terminal shows one message in place of another; a log gets one now and then.
    """

    def __init__(self, message: str, clock: Clock = time.monotonic) -> None:
        self._status = err.status(message)
        self._clock = clock
        self._said_at: float | None = None
        self._is_over = False
        self._status.start()

    def say(self, message: str) -> None:
        """Show what is waited for now; nothing once it is over."""
        if self._is_over:
            return
        now = self._clock()
        if err.is_terminal:
            self._status.update(message)
        elif self._said_at is None or now - self._said_at >= _LOG_S:
            self._said_at = now
            note(message)

    def stop(self) -> None:
        """Stop showing anything."""
        self._is_over = True
        self._status.stop()


def rapid_command() -> str:
    """Return the path of the ``rapid`` command as it can be typed in the current folder."""
    command = Path(sys.executable).parent / "rapid"
    relative = os.path.relpath(command)
    return str(command) if relative.startswith("..") else relative
