"""Spread, tables and kept results of the side by side measurements."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.circumstances import circumstances

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def spread(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """The median with all values, which are few."""
    return {
        "median": round(statistics.median(values), digits),
        "all": [round(value, digits) for value in values],
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Of neighbours in time: what slows the machine for a while slows both."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the median, by 2,000 resamples."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2_000))
    return medians[50], medians[-51]


def shown(measured: dict[str, Any], digits: int = 2) -> str:
    """A spread as a table has it: median (least to most)."""
    low, high = min(measured["all"]), max(measured["all"])
    return f"{measured['median']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def settings(options: argparse.Namespace) -> dict[str, str]:
    """Return a script's options as a kept result tells them.

    Nothing in them says on which machine it was made: where it was written and which server was
    asked are left out, and a path is relative to the repository, or the name alone of what lies
    elsewhere.
    """
    told = {name: value for name, value in vars(options).items() if name not in ("out", "url")}
    return {name: _portable(value) for name, value in told.items()}


def _portable(value: object) -> str:
    path = Path(str(value)).expanduser()
    if not path.is_absolute():
        return str(value)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def keep(
    name: str | None, title: str, text: str, report: dict[str, Any], folder: Path = RESULTS
) -> None:
    """Write `name`.json and `name`.md, with the circumstances, and print the text last.

    Without a name (a quick run) it is printed only.
    """
    report = report | circumstances()
    told = (
        f"{report['date']}, commit {report['commit']}, {report['machine']}, "
        f"load {report['load_average_1_5_15_min']}"
    )
    print(f"{title}\n{told}\n\n{text}")
    if name is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / f"{name}.md").write_text(f"# {title}\n\n{told}\n\n{text}")
