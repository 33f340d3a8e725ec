"""`benchmarks/README.md` names every script, so that a newcomer finds it."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_script_has_its_place_on_the_page() -> None:
    page = (FOLDER / "README.md").read_text()
    shown = set(re.findall(r"`(\w+\.\w+)`", page))
    for room, others in re.findall(r"`(\w+)\.\w+`((?:, `\.\w+`)+)", page):
        shown |= {f"{room}.{name}" for name in re.findall(r"\w+", others)}
    scripts = {
        f"{path.parent.name}.{path.stem}"
        for path in FOLDER.glob("*/*.py")
        if "__main__" in path.read_text()
    }
    assert shown - {"gpu.py"} == scripts
