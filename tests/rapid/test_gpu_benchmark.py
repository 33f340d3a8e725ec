"""The GPU benchmark runs where there is no GPU, at tiny shapes: all its parts, in their order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
PARTS = ["1. correctness", "2. attention", "3. steps", "4. speedups", "5. prefill", "6. Llama"]
ASKED = {"<= 1.15", ">= 60 %", ">= 1.2x", ">= 80 % of the bytes' speedup", ">= 2.3x"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_smoke_run_ends_with_every_number_that_is_asked(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    ran = run("--smoke", "--without", "blocks, ours in Triton", "--out", str(out))
    assert ran.returncode == 0, ran.stderr
    places = [ran.stdout.index(part) for part in PARTS]
    assert places == sorted(places)
    assert "failed" not in ran.stdout
    assert "skipped" not in ran.stdout
    table = json.loads(out.read_text())["table"]
    assert {asked for _, _, asked, verdict in table if verdict in ("pass", "FAIL")} == ASKED
    assert table[-1][0] in ran.stdout.splitlines()[-1]  # the table comes last


def test_without_a_device_it_says_so_and_measures_nothing() -> None:
    ran = run()
    assert ran.returncode == 1
    assert "no CUDA device is visible; --smoke runs tiny shapes" in ran.stderr
    assert ran.stdout == ""
