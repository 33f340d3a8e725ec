"""A hub that is away while all models are here: commands take them from the cache, unasked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.doctor.subject import Subject
from deployments.config import preflight, serve_file
from rapid.embedded import DRAFTER, TARGET
from tests.deployments.cli.doctor.healthy import ROOT, write_config

_COMMIT = "0" * 40


@pytest.mark.parametrize("command", ["check-config", "doctor"])
def test_a_hub_that_accepts_and_says_nothing_is_asked_once(command: str, tmp_path: Path) -> None:
    models = {"acme/target": TARGET, "acme/drafter": DRAFTER}
    for name, source in models.items():
        folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        for part in ("refs", "snapshots"):
            (folder / part).mkdir(parents=True)
        (folder / "refs/main").write_text(_COMMIT)
        (folder / "snapshots" / _COMMIT).symlink_to(source)
    limits = {"max_context": 2048, "kv_cache_tokens": 32768, "max_leases": 4}
    target, drafter = ({"engine": limits | {"model": name}} for name in models)
    config = write_config(tmp_path, target=target, drafter=drafter)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = f"http://127.0.0.1:{listener.getsockname()[1]}"
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub, "COLUMNS": "300"}
        # Else it would first ask which program it is run by.
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [sys.executable, "-c", "from deployments.cli import app; app()", command, str(config)],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": ""},
            capture_output=True,
            text=True,
        )
        listener.setblocking(False)
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):  # nobody has come again
            listener.accept()
    said = "is fine" if command == "check-config" else "2 named, and all are here"
    assert said in done.stdout, done.stderr
    assert "retry" not in done.stderr.lower()


def test_the_hub_is_asked_while_the_file_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both take more than a second, and `doctor` less than three."""
    was_asked = threading.Event()
    read = serve_file.read_applications

    def read_when_asked(*arguments: Any) -> Any:
        assert was_asked.wait(60.0)
        return read(*arguments)

    monkeypatch.setattr(preflight, "check_hub", lambda config: was_asked.set())
    monkeypatch.setattr(serve_file, "read_applications", read_when_asked)
    assert Subject.read(write_config(tmp_path)).problem == ""
