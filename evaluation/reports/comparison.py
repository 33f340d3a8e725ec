"""The difference of two runs over the same items, paired by item."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from evaluation.reports.run_results import RunResults
from evaluation.reports.tables import table, with_sign
from evaluation.results import differences
from rapid.errors import ConfigurationError

_ITEMS = ("name", "source", "metrics", "groups")  # of a task: what is asked and how it is scored


def compare(before: Path, after: Path) -> str:
    """Return a Markdown table of the scores of two runs and of their paired differences.

    A row is a system under a condition that both have; a column is all items, or those of a value
    of the task's first group. Intervals are bootstrap intervals over items, as in reports.

    Raises:
        ConfigurationError: One of them is no run, or their items or scores are not the same, or
            they have no system and condition in common.
    """
    ours, theirs = RunResults.read(after), RunResults.read(before)
    if changes := differences(_items_of(theirs), _items_of(ours)):
        raise ConfigurationError(
            f"{before} and {after} are not of the same items, so they have no paired difference:\n"
            + "\n".join(f"  {each}" for each in changes)
        )
    rows: list[list[str]] = []
    for condition in ours.conditions:
        for system in ours.systems:
            then, now = theirs.of(system, condition), ours.of(system, condition)
            if not then.keys() & now.keys():
                continue
            cells = [
                with_sign(
                    ours.difference(
                        ours.of(system, condition, column), theirs.of(system, condition, column)
                    )
                )
                for column in ours.columns
            ]
            name = system.name + f", {condition.name}" * (len(ours.conditions) > 1)
            # Only the differences have intervals: those of two means say little about them.
            scores = [f"{fmean(map(ours.score, of.values())):.3f}" for of in (then, now)]
            rows.append([name, str(len(then.keys() & now.keys())), *scores, *cells])
    if not rows:
        raise ConfigurationError(f"{before} and {after} have no system and condition in common")
    header = ["system", "n", "before", "after", *(f"Δ {each}" for each in ours.columns)]
    return f"{ours.task.metrics[0]}: {after} minus {before}\n\n{table(header, rows)}"


def _items_of(run: RunResults) -> dict[str, Any]:
    """Return the configuration of what was asked: two runs that share it are paired by item."""
    task = {key: run.configuration["task"].get(key) for key in _ITEMS}
    return {"task": task, "items": run.configuration.get("items")}
