"""Startup time and memory of the embedded application.

    python -m benchmarks.serving.startup [--repeats 3]

The script runs the command of `make run` on a free port. It measures the time from the command to
the first 200 of ``GET /ready``, and, after one answered question, the proportional set size (PSS)
of every process below the command. The goal is to be ready in 60 s and to take at most 5 GiB.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.serving.embedded_application import ROOT, embedded_application
from evaluation.circumstances import circumstances


def run_once() -> tuple[float, dict[str, int]]:
    """Return the seconds until ready, and MiB of PSS by kind of process."""
    with embedded_application() as application:
        ask(application.url)
        return application.ready_s, memory_mib(application.pid)


def ask(url: str) -> None:
    """Request one fused answer, so that everything lazy is loaded."""
    reply = httpx.post(
        f"{url}/v1/chat/completions",
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
