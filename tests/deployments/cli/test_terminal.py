"""What commands print, and where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

from deployments.cli.terminal import fail, note, rapid_command


def test_messages_are_on_standard_error_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    note("see [red] " + "x" * 200)
    with pytest.raises(typer.Exit) as ended:
        fail("set [red]")
    assert ended.value.exit_code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["see [red] " + "x" * 200, "error: set [red]"]


def test_the_command_is_what_can_be_typed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "home" / "bin" / "python"))
    for folder in ("home", "elsewhere"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "home")
    assert rapid_command() == "bin/rapid"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert rapid_command() == str(tmp_path / "home" / "bin" / "rapid")
