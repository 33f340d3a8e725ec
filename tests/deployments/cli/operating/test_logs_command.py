"""`rapid logs`: the last lines, those that come, and the files of a pool."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from deployments.cli.operating import logs_command
from deployments.cli.operating.logs_command import GrowingFiles
from deployments.cli.server.server_state import ServerState
from tests.deployments.cli.command import rapid


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a server that has ended, with its log and those of its session."""
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "session" / "logs" / "serve"
    logs.mkdir(parents=True)
    for name in ("Target_abc", "Target_abc_engine", "Drafter_def"):
        (logs / f"replica_rapid_{name}.log").write_text(f"{name} says\n")
    ServerState("", {"target": "ready"}, session=str(tmp_path / "session")).write()
    (tmp_path / ".run" / "serve.log").write_text("1\n2\n3\n")
    return tmp_path


def test_the_last_lines(folder):
    assert rapid("logs", "-n", "2").stdout == "2\n3\n"


def test_a_pool_has_files_of_replicas_and_engines(folder):
    said = rapid("logs", "--pool", "target").stdout.splitlines()
    assert sorted(said) == ["Target_abc says", "Target_abc_engine says"]
    result = rapid("logs", "--pool", "targets")
    assert result.exit_code == 1
    assert "no pool 'targets' has a log on this machine; there are target" in result.stderr


def test_an_empty_log_says_what_is_written(folder):
    (folder / ".run" / "serve.log").write_text("")
    assert "log_level of the configuration" in rapid("logs").stderr.replace("\n", " ")


def test_no_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options in ((), ("--pool", "target")):
        assert rapid("logs", *options).exit_code == 1


def test_lines_are_followed_until_the_server_ends(folder, monkeypatch):
    log = folder / ".run" / "serve.log"
    more = iter(["4\n5", "5\n", None])

    def grow() -> int | None:
        lines = next(more)
        with log.open("a") as file:
            file.write(lines or "6\n")
        return None if lines is None else 1

    monkeypatch.setattr(logs_command, "_LOOK_S", 0.0)
    monkeypatch.setattr("deployments.cli.server.server_process.running_pid", grow)
    assert rapid("logs", "-f", "-n", "1").stdout.splitlines() == ["4", "55", "6"]


def test_a_file_that_begins_anew_is_read_from_its_start(folder):
    files = GrowingFiles(folder / ".run", re.compile(r"serve\.log"), 50)
    assert list(files.read_more()) == ["1", "2", "3"]
    (folder / ".run" / "serve.log").write_text("9\n")
    assert list(files.read_more()) == ["9"]
    assert list(files.read_more()) == []


def test_the_servers_output_is_read_without_rays_prefixes(folder):
    said = "\x1b[36m(Proxy pid=94)\x1b[0m Lost.\n"
    (folder / ".run" / "serve.log").write_text(said)
    assert rapid("logs").stdout == "Proxy  Lost.\n"


def test_a_pools_lines_are_whole_for_programs_and_short_on_a_terminal(folder, monkeypatch):
    line = '{"asctime": "2026-11-27 14:47:04,5", "message": "ok", "deployment": "rapid_Target"}'
    (folder / "session" / "logs" / "serve" / "replica_rapid_Target_abc.log").write_text(line + "\n")
    assert line in rapid("logs", "--pool", "target").stdout
    monkeypatch.setattr(logs_command, "out", Console(force_terminal=True))
    assert "2026-11-27 14:47:04  rapid_Target  ok" in rapid("logs", "--pool", "target").stdout
