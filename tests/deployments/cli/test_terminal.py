"""What commands print, and where."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from deployments.cli import terminal
from deployments.cli.terminal import Waiting, fail, note, print_json, print_text, rapid_command


def test_messages_are_on_standard_error_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    note("see [red] " + "x" * 200)
    with pytest.raises(typer.Exit) as ended:
        fail("set [red]")
    assert ended.value.exit_code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["see [red] " + "x" * 200, "error: set [red]"]


HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r\x00\x7f\tb\nc\u00e9"


def test_what_would_steer_a_terminal_is_dropped_from_every_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_text(HOSTILE, ends_line=False)
    assert capsys.readouterr().out == "a]0;owned[2J31m\tb\ncé"
    note(HOSTILE)
    with pytest.raises(typer.Exit):
        fail(HOSTILE)
    said = capsys.readouterr().err
    assert {each for each in said if not each.isprintable()} <= {"\n", "\t"}


def test_json_has_every_character_and_prints_no_control(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": HOSTILE})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"text": HOSTILE}
    assert {each for each in shown if not each.isprintable()} == {"\n"}
    assert "é" in shown


def test_a_terminal_shows_the_latest_of_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    screen = Console(file=shown, force_terminal=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr(terminal, "err", screen)
    waiting = Waiting("thinking")
    waiting.say("reading 1 of 3 tokens")
    waiting.say("reading 2 of 3 tokens")
    waiting.stop()
    assert "reading 2 of 3 tokens" in shown.getvalue()


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


def test_a_log_gets_a_line_about_a_wait_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    waiting = Waiting("thinking", lambda: now[0])
    for seconds, message in ((1.0, "a"), (2.0, "b"), (17.0, "c"), (18.0, "d")):
        now[0] = seconds
        waiting.say(message)
    waiting.stop()
    assert capsys.readouterr().err.splitlines() == ["a", "c"]
