"""Environments of Python for programs that the project's own environment must not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def install(listed: Path, name: str) -> Path:
    """Return the Python of an environment below `build`, which is made where it is not as listed.

    Args:
        listed: The requirements, as pip reads them.
        name: The folder of the environment.
    """
    folder = ROOT / "build" / name
    python, stamp = folder / "bin/python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != listed.read_text():
        print(f"installing {listed.name} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", listed], check=True)
        stamp.write_text(listed.read_text())
    return python
