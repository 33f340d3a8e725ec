"""Plots of a run, as SVG that is identical for identical results.

Colours are those of Okabe and Ito ("Color Universal Design", 2008), which colour-blind readers can
distinguish; line styles and markers carry the same distinction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported, so that no display is needed

from matplotlib import pyplot

from evaluation.reports.run_results import (
    ByItem,
    RunResults,
    acceptance_at,
    speedup,
    tokens_per_second,
    won_and_lost,
)
from evaluation.reports.statistics import Estimate
from evaluation.systems import System

_STYLE: Any = {
    "svg.hashsalt": "rapid",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.markersize": 4,
    "figure.constrained_layout.use": True,
}
_LOOKS: dict[str, tuple[str, str, str]] = {  # by what a system does: colour, line, marker
    "plain": ("#000000", "-", "o"),
    "rag": ("#E69F00", "--", "s"),
    "lossless": ("#56B4E9", "-.", "^"),
    "naive": ("#CC79A7", ":", "v"),
    "window": ("#CC79A7", ":", "v"),
    "lookup": ("#999999", ":", "D"),
    "paper": ("#D55E00", "--", "P"),
    "distill": ("#0072B2", "-", "X"),
    "boost": ("#009E73", "-", "*"),
    "adaptive": ("#009E73", "--", "p"),
    "mixture": ("#0072B2", ":", "h"),
    "retrieved": ("#E69F00", "-.", "<"),
}
_UPWARD = ("drafter", "naive")

Curve = tuple[System, list[tuple[str, Estimate]]]


def draw(run: RunResults, out_dir: Path) -> dict[str, Path]:
    """Draw every plot that the run has results for, and return its files in `out_dir` by name."""
    pictures = {
        "accuracy": _accuracy,
        "speed": _speed,
        "eta": _eta,
        "acceptance": _acceptance,
        "won_and_lost": _won_and_lost,
    }
    made: dict[str, Path] = {}
    with pyplot.rc_context(_STYLE):
        for name, picture in pictures.items():
            figure = picture(run)
            if figure is not None:
                out_dir.mkdir(parents=True, exist_ok=True)
                made[name] = out_dir / f"{name}.svg"
                figure.savefig(made[name], metadata={"Date": None})
                pyplot.close(figure)
    return made


def _accuracy(run: RunResults) -> Any:
    """Draw the score by the first group, without lossless systems, whose curve is `plain`'s."""
    shown = [system for system in run.systems if system.method != "lossless"]
    curves = _by_column(run, shown, lambda _, results: run.scores(results))
    return _two_panels(run, curves, run.task.metrics[0])


def _speed(run: RunResults) -> Any:
    """Draw tokens per second by the first group, relative to plain decoding if it was run."""
    plain = run.plain
    if not run.is_timed:
        return None

    def speed(column: str, results: ByItem) -> Estimate | None:
        if plain is None:
            return tokens_per_second(results)
        return speedup(results, run.headline(plain, column))

    curves = _by_column(run, run.systems, speed)
    return _two_panels(run, curves, "tokens/s" if plain is None else "tokens/s, over plain")


def _by_column(
    run: RunResults,
    systems: Sequence[System],
    estimate: Callable[[str, ByItem], Estimate | None],
) -> list[Curve]:
    curves: list[Curve] = []
    for system in systems:
        points = []
        for column in run.columns[1:]:
            found = estimate(column, run.headline(system, column))
            if found is not None:
                points.append((column, found))
        if points:
            curves.append((system, points))
    return curves


def _two_panels(run: RunResults, curves: Sequence[Curve], what: str) -> Any:
    """Draw systems with one model on the left, with two on the right, and `plain` in both."""
    panels = {
        "one model": [curve for curve in curves if curve[0].drafts not in _UPWARD],
        "target and drafter": [curve for curve in curves if curve[0].drafts in _UPWARD],
    }
    plain = [curve for curve in curves if curve[0].method == "plain"]
    panels = {title: _with_plain(plain, panel) for title, panel in panels.items()}
    panels = {title: panel for title, panel in panels.items() if panel}
    if not panels:
        return None
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.8), sharey=True, squeeze=False
    )
    for axis, (title, panel) in zip(axes[0], panels.items(), strict=True):
        _lines(axis, panel)
        axis.set(title=title, xlabel=run.task.groups[0] if run.task.groups else "")
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    axes[0][0].set_ylabel(what)
    return figure


def _with_plain(plain: list[Curve], panel: list[Curve]) -> list[Curve]:
    others = [curve for curve in panel if curve not in plain]
    return [*plain, *others] if others else []


def _lines(axis: Any, curves: Sequence[Curve]) -> None:
    ticks = list(dict.fromkeys(x for _, points in curves for x, _ in points))
    for number, (system, points) in enumerate(curves):
        places = [ticks.index(x) + 0.04 * (number - len(curves) / 2) for x, _ in points]
        _line(axis, system, places, [estimate for _, estimate in points])
    axis.set_xticks(range(len(ticks)), ticks)


def _line(axis: Any, system: System, places: Sequence[float], found: Sequence[Estimate]) -> None:
    colour, line, marker = _look(system)
    axis.errorbar(
        places,
        [estimate.value for estimate in found],
        _spread(found),
        color=colour,
        linestyle=line,
        marker=marker,
        linewidth=1.3,
        elinewidth=0.7,
        capsize=1.5,
        label=system.name,
    )


def _spread(found: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of the error bars below and above each point, `[2, points]`."""
    return [
        [max(0.0, each.value - each.low) for each in found],
        [max(0.0, each.high - each.value) for each in found],
    ]


def _look(system: System) -> tuple[str, str, str]:
    kind: str = system.drafts if system.drafts in _LOOKS else system.method
    if system.method == "fused":
        kind = system.speculation().transfer
    if system.target_reads == "retrieved":
        kind = "retrieved"
    return _LOOKS.get(kind, ("#F0E442", "-", "d"))


def _eta(run: RunResults) -> Any:
    """Draw the score by eta, with a panel per kind of retrieval.

    Systems that eta does not change are horizontal lines.
    """
    families = run.families
    if not families:
        return None
    columns = min(3, len(families))
    rows = -(-len(families) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.1 * columns, 2.7 * rows), sharey=True, squeeze=False
    )
    for axis, entry in zip_longest(axes.flat, families.items()):
        if entry is None:
            axis.set_axis_off()
            continue
        name, members = entry
        for system in run.systems:
            found = ((each.eta, run.scores(run.of(system, each))) for each in members)
            points = [(eta, score) for eta, score in found if eta is not None and score]
            if points and system.fuses:
                _eta_line(axis, system, points)
            elif points and system.method in ("plain", "rag"):
                _level(axis, system, points[0][1])
        axis.set(title=name, xlabel="eta")
    for row in axes:
        row[0].set_ylabel(run.task.metrics[0])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    return figure


def _eta_line(axis: Any, system: System, points: Sequence[tuple[float, Estimate]]) -> None:
    colour, line, marker = _look(system)
    axis.plot(
        [eta for eta, _ in points],
        [estimate.value for _, estimate in points],
        color=colour,
        linestyle=line if system.drafts == "drafter" else "--",
        marker=marker,
        markerfacecolor=colour if system.drafts == "drafter" else "none",
        label=system.name,
    )
    axis.fill_between(
        [eta for eta, _ in points],
        [estimate.low for _, estimate in points],
        [estimate.high for _, estimate in points],
        color=colour,
        alpha=0.1,
        linewidth=0,
    )


def _level(axis: Any, system: System, score: Estimate) -> None:
    line = "--" if system.drafts == "target" else ":"
    axis.axhline(score.value, color=_look(system)[0], linestyle=line, label=system.name)


def _acceptance(run: RunResults) -> Any:
    """Draw the share of judged drafts that were accepted, by position in the block."""
    curves: list[Curve] = []
    for system in run.systems:
        results = run.headline(system)
        longest = max((len(each.by_position) for each in results.values()), default=0)
        points = [(str(i + 1), acceptance_at(results, i)) for i in range(longest)]
        known = [(x, estimate) for x, estimate in points if estimate is not None]
        if known:
            curves.append((system, known))
    figure = _two_panels(run, curves, "accepted")
    for axis in figure.axes if figure else ():
        axis.set_xlabel("position in the block")
    return figure


def _won_and_lost(run: RunResults) -> Any:
    """Draw the shares of items scored above plain (right) and below (left), as Figure 2 does.

    The hatched part of a bar are the items that its own RAG scores no better, or no worse, either.
    """
    if run.plain is None:
        return None
    base = run.headline(run.plain)
    bars: list[tuple[System, Estimate, Estimate]] = []
    for system in run.systems:
        both = won_and_lost(run, run.headline(system), base)
        if both and system.method != "plain" and any(each.value for each in both):
            bars.append((system, *both))
    if not bars:
        return None
    figure, axis = pyplot.subplots(figsize=(6.2, 0.6 + 0.33 * len(bars)))
    for place, (system, won, lost) in enumerate(reversed(bars)):
        for side, estimate, colour in ((1, won, "#009E73"), (-1, lost, "#D55E00")):
            spread = _spread([estimate])[::side]
            axis.barh(place, side * estimate.value, color=colour, xerr=spread, ecolor="#444444")
        rag = run.rag_of(system)
        alone = rag and won_and_lost(run, run.headline(system), base, run.headline(rag))
        for side, estimate in zip((1, -1), alone or (), strict=False):
            axis.barh(place, side * estimate.value, fill=False, hatch="////", edgecolor="#FFFFFF")
    axis.set_yticks(range(len(bars)), [system.name for system, _, _ in reversed(bars)])
    axis.axvline(0, color="#000000", linewidth=0.8)
    axis.set_xlabel(
        "share of items: worse than plain (left), better than plain (right)\n"
        "hatched: also worse, or better, than its drafting model on the retrieved text"
    )
    return figure
