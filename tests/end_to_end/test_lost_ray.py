"""`rapid serve` as it is typed, whose Ray loses the process below everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RAPID = Path(sys.executable).parent / "rapid"


def test_a_server_whose_raylet_is_killed_ends_with_a_sentence_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    file = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    file["http_options"]["port"] = port = free_port()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    served = subprocess.Popen(
        [RAPID, "serve", "config.yaml"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert served.stderr is not None
    told = []
    for line in iter(served.stderr.readline, ""):
        told.append(line)
        if line.startswith("Ctrl-C here"):
            break
    assert httpx.get(f"http://127.0.0.1:{port}/ready").json()["ready"], told
    assert any(line.startswith("Ray started (") for line in told)
    assert any(line.startswith("pools: ") and "target" in line for line in told)
    (runs,) = psutil.Process(served.pid).children()
    (raylet,) = [each for each in runs.children() if each.name() == "raylet"]
    below = runs.children(recursive=True)
    raylet.kill()
    told_then = served.stderr.read()
    assert served.wait() == 1
    assert "error: Ray is lost, as its raylet has died" in told_then
    assert [each for each in below if each.is_running() and each.status() != "zombie"] == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/ready")
    served.stderr.close()
