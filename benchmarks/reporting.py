"""Statistics, tables and kept results of the side-by-side measurements."""

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
    """Return the median with all values, which are few."""
    return {
        "median": round(statistics.median(values), digits),
        "all": [round(value, digits) for value in values],
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return ratios of neighbours in time, because what slows the machine slows both of them."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by 2,000 resamples."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2_000))
    return medians[50], medians[-51]


def shown(measured: dict[str, Any], digits: int = 2) -> str:
    """Format a spread for a table: median (least to most)."""
    low, high = min(measured["all"]), max(measured["all"])
    return f"{measured['median']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def settings(options: argparse.Namespace) -> dict[str, str]:
    """Return a script's options for a kept result, without traces of the machine it ran on.

    The output path and the server's address are left out. A path is relative to the repository, or
    only a name if it lies elsewhere.
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
    """Print the text with the circumstances, and write both to `name`.json and `name`.md.

    Without a name, as in a quick run, they are only printed.
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
