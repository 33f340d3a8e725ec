"""``rapid eval`` as it is typed, and what it prints."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from deployments.cli import app


def rapid_eval(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments])


def words(result: Result) -> str:
    return " ".join(result.output.split())
