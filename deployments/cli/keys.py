"""The command ``rapid hash-key``, which hashes an API key for the configuration."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer

from deployments.cli.terminal import fail, note


def hash_key(
    new: Annotated[
        bool, typer.Option("--new", help="Make a new key; it is shown once, on standard error.")
    ] = False,
) -> None:
    """Read an API key and print its SHA-256, for api.keys in the configuration.

    The key comes from a hidden prompt, or from standard input when that is no terminal.
    """
    from library.accounts.callers import hash_key as hash_of

    if new:
        key = f"sk-{secrets.token_urlsafe(32)}"
        note(f"key (keep it, it is stored nowhere): {key}")
    elif sys.stdin.isatty():
        key = typer.prompt("API key", hide_input=True, err=True)
    else:
        key = sys.stdin.readline()
    if not key.strip():
        fail("there is no key: type one, pipe one in, or let --new make one")
    typer.echo(hash_of(key.strip()))
