"""Startup time and memory of the embedded application.

    python benchmarks/startup.py [--repeats 3]

The script runs the command of `make run` on a free port. It measures the time from the command to
the first 200 of ``GET /ready``, and, after one answered question, the proportional set size (PSS)
of every process below the command. The goal is to be ready in 60 s and to take at most 5 GiB.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from evaluation.circumstances import circumstances  # noqa: E402
from tests.ray_cluster import free_port  # noqa: E402

TIMEOUT_S = 180.0


def run_once() -> tuple[float, dict[str, int]]:
    """Return the seconds until ready, and MiB of PSS by kind of process."""
    settings = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    port = settings["http_options"]["port"] = free_port()
    with tempfile.TemporaryDirectory(prefix="rapid-", dir="/tmp") as folder:
        config = Path(folder) / "serve_config.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = [str(Path(sys.executable).parent / "rapid"), "serve", str(config)]
        began = time.monotonic()
        with (Path(folder) / "output").open("wb") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
            try:
                ready_s = wait_until_ready(process, port, began)
                ask(port)
                return ready_s, memory_mib(process.pid)
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(90)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, began: float) -> float:
    while time.monotonic() - began < TIMEOUT_S:
        if process.poll() is not None:
            raise SystemExit(f"the application ended with {process.returncode}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                return time.monotonic() - began
        except httpx.HTTPError:
            time.sleep(0.25)
    raise SystemExit(f"not ready within {TIMEOUT_S} s")


def ask(port: int) -> None:
    """Request one fused answer, so that everything lazy is loaded."""
    reply = httpx.post(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json={
            "model": "rapid-embedded",
            "messages": [{"role": "user", "content": "What is the harbor of Varo?"}],
            "max_tokens": 30,
            "rapid": {"documents": [{"name": "a", "text": "The harbor of Varo is Lune. " * 30}]},
        },
        timeout=60,
    )
    reply.raise_for_status()


def memory_mib(pid: int) -> dict[str, int]:
    total: Counter[str] = Counter()
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            name = " ".join(process.cmdline())
            total[kind_of(name)] += process.memory_full_info().pss
        except psutil.Error:
            continue
    return {kind: round(size / 2**20) for kind, size in total.most_common()}


def kind_of(command: str) -> str:
    actor = re.match(r"ray::(\S+)", command)
    if actor:
        return actor[1].removeprefix("ServeReplica:rapid:")
    return "Ray itself" if "ray" in command else "command"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/startup.json")
    arguments = parser.parse_args()
    found = circumstances()
    runs = [run_once() for _ in range(arguments.repeats)]
    sums = [sum(memory.values()) for _, memory in runs]
    report: dict[str, Any] = {
        "ready_s": {
            "median": round(statistics.median(seconds for seconds, _ in runs), 1),
            "all": [round(seconds, 1) for seconds, _ in runs],
        },
        "pss_mib": {"median": statistics.median(sums), "all": sums, "last_by_kind": runs[-1][1]},
        **found,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
