"""The command ``rapid doctor``: what can keep a server from starting or working well here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from deployments.cli.terminal import err, note, out

if TYPE_CHECKING:
    from deployments.cli.doctor.check_result import CheckResult

_SIGNS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[bold red]error[/]"}


def doctor(
    config: Annotated[
        Path, typer.Argument(help="The configuration that the server is to run.")
    ] = Path("serve_config.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what can keep a server from starting or from working well here.

    It changes nothing. The exit status is 0 if all is well, 1 with warnings, and 2 if the server
    cannot work. Ray's processes of an earlier run are named, and end only by your hand.
    """
    from deployments.cli.doctor.checklist import examine

    with err.status("looking"):
        diagnosis = examine(config)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in diagnosis.findings], indent=2))
    else:
        out.print(_table(diagnosis.findings))
        if not diagnosis.status:
            note("all is well")
    raise typer.Exit(diagnosis.status)


def _table(findings: tuple[CheckResult, ...]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in findings:
        mend = f"\n[bold]{escape(each.mend)}[/]" if each.mend else ""
        table.add_row(_SIGNS[each.mark], each.check, escape(each.fact) + mend)
    return table
