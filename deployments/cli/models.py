"""The commands ``rapid models list``, ``get`` and ``path``: models with a short name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from deployments.cli.terminal import (
    AsJson,
    err,
    fail,
    note,
    out,
    print_json,
    rapid_command,
)

if TYPE_CHECKING:
    from rapid.checkpoints.downloads.fetching import Progress

app = typer.Typer(no_args_is_help=True, help="Fetch models, and use them by their short names.")


@app.command("list", epilog="Example: rapid models list --json")
def list_models(as_json: AsJson = False) -> None:
    """List the models of the catalogue, and which of them are on this machine."""
    from rapid.catalogue import CATALOGUE, models_folder
    from rapid.checkpoints.downloads.fetching import find_fetched

    models_folder()  # refuses a RAPID_HOME that cannot be, before anything is printed
    if as_json:
        print_json(
            [
                {
                    "name": entry.name,
                    "summary": entry.summary,
                    "licence": entry.licence,
                    "bytes": entry.num_bytes,
                    "context_tokens": entry.context_tokens,
                    "is_here": find_fetched(entry) is not None,
                }
                for entry in CATALOGUE
            ]
        )
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)
    for heading in ("what it is", "licence"):
        table.add_column(heading)
    table.add_column("MB", justify="right")
    table.add_column("context", justify="right")
    table.add_column("here")
    for entry in CATALOGUE:
        table.add_row(
            entry.name,
            entry.summary,
            entry.licence,
            f"{entry.num_bytes / 1e6:,.0f}",
            f"{entry.context_tokens:,}",
            "yes" if find_fetched(entry) else "no",
        )
    out.print(table)
    note("context: the longest text with its answer, in tokens")


@app.command("get", epilog="Example: rapid models get smollm2-135m")
def get(
    names: Annotated[
        list[str], typer.Argument(help="Names of 'rapid models list'.", show_default=False)
    ],
) -> None:
    """Fetch models where they are not here yet, check their hashes, and say where they lie."""
    from rapid.catalogue import find
    from rapid.checkpoints.downloads.fetching import FetchFailed, fetch

    try:
        entries = [find(name) for name in names]
        for entry in entries:
            with _bar() as progress:
                path = fetch(entry, progress, note)
            note(f"{entry.name}: {path}")
    except FetchFailed as error:
        fail(f"{error}; check the network and the index that pip uses, then run it again")
    except KeyboardInterrupt:
        fail(f"interrupted; '{rapid_command()} models get {' '.join(names)}' goes on from there")


@app.command("path", epilog="Example: rapid models path smollm2-135m")
def path(name: Annotated[str, typer.Argument(help="A name of 'rapid models list'.")]) -> None:
    """Print where a fetched model lies."""
    from rapid.catalogue import find
    from rapid.checkpoints.downloads.fetching import find_fetched

    entry = find(name)
    path = find_fetched(entry)
    if path is None:
        fail(f"{entry.name} has not been fetched: run '{rapid_command()} models get {entry.name}'")
    typer.echo(path)


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, visible=True)

        yield progress
