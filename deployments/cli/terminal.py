"""How commands speak: answers on standard output, everything else on standard error."""

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
    """End the command with a sentence that says what to do."""
    err.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(1)


def note(message: str) -> None:
    """Say something that is not the result."""
    err.print(f"[dim]{escape(message)}[/]", soft_wrap=True, highlight=False)


def rapid_command() -> str:
    """This command as the user can type it here."""
    command = Path(sys.executable).parent / "rapid"
    relative = os.path.relpath(command)
    return str(command) if relative.startswith("..") else relative
