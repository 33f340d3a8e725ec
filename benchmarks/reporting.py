"""Spread, tables and kept results of the side by side measurements."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.circumstances import circumstances

RESULTS = Path(__file__).parent / "results"


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
