"""Markdown tables, and the format of estimates in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from evaluation.reports.estimates import Estimate
from evaluation.reports.run_results import ByItem, RunResults
from evaluation.systems import System

_MARKS = {1: " ▲", -1: " ▼", 0: ""}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; bars and line breaks within cells are replaced."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in line)} |\n"
        for line in lines
    )


def by_system(
    run: RunResults,
    cell: Callable[[System, ByItem, str], str],
    rows: Mapping[str, System] | None = None,
    columns: Sequence[str] | None = None,
) -> str:
    """Return a table with a row per system and a column per value of the task's first group.

    It covers results under the first condition; the first column is over all items.

    Args:
        cell: Returns the text of a cell for a system, its results in a column, and the column.
        rows: The systems by the names of their rows; None takes all.
        columns: None takes `run.columns`.
    """
    counts = {
        column: max(len(run.headline(system, column)) for system in run.systems)
        for column in (run.columns if columns is None else columns)
    }
    lines: list[list[str]] = []
    for name, system in ({s.name: s for s in run.systems} if rows is None else rows).items():
        row = [name]
        for column, count in counts.items():
            results = run.headline(system, column)
            missing = "" if len(results) == count else f" (n = {len(results)})"
            row.append(cell(system, results, column) + missing)
        lines.append(row)
    return table(["system", *(f"{column} (n = {n})" for column, n in counts.items())], lines)


def with_interval(found: Estimate | None, spec: str = ".3f") -> str:
    """Format an estimate and its interval, if it has one, with the format `spec` for each."""
    if found is None:
        return "-"
    if not found.has_interval:
        return f"{found.value:{spec}}"
    return f"{found.value:{spec}} ({found.low:{spec}}-{found.high:{spec}})"


def with_sign(found: Estimate | None) -> str:
    """Format an estimated difference and its interval, marked if the interval excludes zero."""
    if found is None:
        return "-"
    if not found.has_interval:
        return f"{found.value:+.3f}"
    interval = f"{found.low:+.3f} to {found.high:+.3f}"
    return f"{found.value:+.3f} ({interval}){_MARKS[found.sign]}"


def against(run: RunResults, ours: ByItem, theirs: ByItem) -> str:
    """Format the score of `ours`, marked if the interval of its difference excludes zero."""
    difference = run.difference(ours, theirs)
    return with_interval(run.scores(ours)) + (_MARKS[difference.sign] if difference else "")
