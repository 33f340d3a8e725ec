"""The command line, called as it is typed."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from deployments.cli import app


def rapid(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(app, arguments, **options)  # type: ignore[arg-type]
