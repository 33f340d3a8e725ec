"""The options of ``rapid eval`` as one value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from deployments.cli.evals.eval_options import EvalOptions, gather_options


def asked(*arguments: str, **environment: str) -> EvalOptions:
    """Return what a command of these options is called with."""
    received: list[EvalOptions] = []

    @gather_options
    def command(options: EvalOptions) -> None:
        received.append(options)

    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, arguments, env=environment).exit_code == 0
    return received[0]


def test_what_is_typed_reaches_the_command_in_one_value_that_cannot_be_changed():
    options = asked(
        *("--task", "laptop", "--system", "sd", "--system", "plain", "--eta", "3", "--batch", "2"),
        *("--out", "here", "--dry-run"),
        RAPID_API_KEY="secret",
    )
    assert options == EvalOptions(
        task="laptop",
        system=["sd", "plain"],
        eta=3.0,
        batch=2,
        api_key="secret",
        out_dir=Path("here"),
        dry_run=True,
    )
    with pytest.raises(FrozenInstanceError):
        options.task = "other"  # type: ignore[misc]


def test_what_is_not_typed_is_none():
    given = {field.name: getattr(asked(), field.name) for field in fields(EvalOptions)}
    flags = ("dry_run", "is_list", "as_json", "reuse_prefill")
    assert {given.pop(each) for each in flags} == {False}
    assert set(given.values()) == {None}
