"""Date, commit and machine of a measurement, which every kept result carries."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any


def circumstances() -> dict[str, Any]:
    """Return the date, the commit (empty outside a checkout), the machine and its load."""
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{_cpu()}, {os.cpu_count()} cores",
        "load_average_1_5_15_min": [round(load, 1) for load in os.getloadavg()],
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:  # git is not installed
        return ""
    return told.stdout.strip()


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
