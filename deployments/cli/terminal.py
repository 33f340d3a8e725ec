"""Output of the commands: results on standard output, everything else on standard error."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

DEFAULT_URL = "http://127.0.0.1:8000"

out = Console()
err = Console(stderr=True)


def fail(message: str) -> NoReturn:
    """Print an error that says what to do, and end the command with exit status 1."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(1)


def note(message: str) -> None:
    """Print a message that is not part of the result, on standard error."""
    err.print(f"[dim]{escape(message)}[/]", soft_wrap=True, highlight=False)


def rapid_command() -> str:
    """Return the path of the ``rapid`` command as it can be typed in the current folder."""
    command = Path(sys.executable).parent / "rapid"
    relative = os.path.relpath(command)
    return str(command) if relative.startswith("..") else relative
