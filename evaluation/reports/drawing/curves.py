"""The parts that plots are made of: curves in panels, bars, whiskers and labels.

Colours are those of Okabe and Ito ("Color Universal Design", 2008) and one of Tol's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import pyplot
from matplotlib.transforms import ScaledTranslation

from evaluation.reports.estimates import LEAST_ITEMS, Estimate
from evaluation.reports.run_results import RunResults
from evaluation.systems import System

SMALL = 8  # points, the smallest that a page of 900 pixels leaves readable
_ASIDE = 1.8  # points from curve to curve
WHISKERS = f"whiskers: 95 % intervals, bootstrap over items (from {LEAST_ITEMS} items on)"
_LOOKS: dict[str, tuple[str, str, str]] = {  # by what a system does: colour, line, marker
    "plain": ("#000000", "-", "o"),
    "rag": ("#E69F00", "--", "s"),
    "lossless": ("#56B4E9", "-.", "^"),
    "naive": ("#CC79A7", ":", "v"),
    "window": ("#CC79A7", ":", "v"),
    "lookup": ("#999999", ":", "D"),
    "paper": ("#D55E00", "-.", "P"),
    "distill": ("#0072B2", "-", "X"),
    "boost": ("#009E73", "-", "*"),
    "adaptive": ("#882255", "-", "p"),
    "mixture": ("#0072B2", ":", "h"),
    "retrieved": ("#E69F00", "-.", "<"),
}
_UPWARD = ("drafter", "naive")


@dataclass(frozen=True)
class Curve:
    """A system's estimates, each with its number or category, in ascending order."""

    system: System
    name: str
    points: Sequence[tuple[str, Estimate]]


def num_items(found: Iterable[Estimate]) -> str:
    """Say of how many items the estimates are made."""
    counts = {each.items for each in found}
    least, most = min(counts), max(counts)
    return f"n = {most}" if least == most else f"n = {least}-{most}"


def at(curves: Sequence[Curve], x: str) -> list[Estimate]:
    """Return the estimates of all curves at one place."""
    return [each for curve in curves for place, each in curve.points if place == x]


def two_panels(run: RunResults, curves: Sequence[Curve], what: str) -> Any:
    """Draw systems with one model on the left, with two on the right, and `plain` in both."""
    panels: dict[str, list[Curve]] = {}
    plain = [curve for curve in curves if curve.system == run.plain]
    for title, is_upward in (
        ("one model: the target", False),
        ("two models: target and drafter", True),
    ):
        own = [each for each in curves if (each.system.drafts in _UPWARD) == is_upward]
        if others := [each for each in own if each not in plain]:
            panels[title] = [*plain, *others]
    if not panels:
        return None
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.6), sharey=True, squeeze=False
    )
    for axis, (title, panel) in zip(axes[0], panels.items(), strict=True):
        for number, curve in enumerate(panel):
            _line(axis, curve, _ASIDE * (number - (len(panel) - 1) / 2))
        axis.set_title(title)
    axes[0][0].set_ylabel(what)
    return figure


def _line(axis: Any, curve: Curve, aside: float) -> None:
    """Draw a curve, moved `aside` by so many points that its whiskers are told from others'."""
    colour, line, marker = look(curve.system)
    found = [estimate for _, estimate in curve.points]
    drawn = axis.errorbar(
        [float(x) for x, _ in curve.points],
        [estimate.value for estimate in found],
        spread(found),
        color=colour,
        linestyle=line,
        marker=marker,
        linewidth=1.3,
        elinewidth=0.8,
        label=curve.name,
        clip_on=False,  # a point at zero is seen whole
    )
    # The data keep their place, and with them the limits and ticks of the axis.
    moved = ScaledTranslation(aside / 72, 0, axis.figure.dpi_scale_trans)
    for part in drawn.get_children():
        part.set_transform(axis.transData + moved)


def finish(figure: Any) -> Any:
    """Write the names of the curves beside their ends."""
    if figure is None:
        return None
    figure.supxlabel(WHISKERS, fontsize=SMALL)
    for axis in figure.axes:
        lines = [(each.get_label(), each.lines[0]) for each in axis.containers]
        label_ends(axis, lines)
    return figure


def label_ends(axis: Any, lines: Sequence[tuple[str, Any]]) -> None:
    """Write the names of matplotlib's lines right of a panel, as near to their ends as they fit."""
    axis.figure.draw_without_rendering()  # the panel gets its height
    one_line = 1.25 * SMALL / 72 * axis.figure.dpi / axis.get_window_extent().height
    to_share = axis.transScale + axis.transLimits
    ends = [line.get_xydata()[-1] for _, line in lines]
    heights = _apart(
        [to_share.transform(end)[1] for end in ends],
        [one_line * (1.3 + name.count("\n")) for name, _ in lines],
    )
    for (name, line), end, height in zip(lines, ends, heights, strict=True):
        leader = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.7}
        axis.annotate(
            name,
            end,
            (1.06, height),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize=SMALL,
            annotation_clip=False,
            arrowprops=leader | {"relpos": (0, 0.5), "shrinkB": 2},
        )


def _apart(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Return the heights nearest to `wanted` at which labels of these sizes do not overlap.

    In order of height, what is wanted less the room of the labels below must not fall; the nearest
    such numbers are an isotonic regression, by pooling adjacent violators. All are kept between 0
    and 1 as long as there is room for them.
    """
    order = np.argsort(wanted, kind="stable")
    room = np.array(sizes)[order]
    below = np.cumsum(room) - room / 2
    pools: list[list[float]] = []
    for number in np.array(wanted)[order] - below:
        pools.append([number])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    apart = np.empty(len(order))
    pooled = [np.mean(pool) for pool in pools for _ in pool]
    apart[order] = np.clip(pooled, 0, max(0, 1 - sum(sizes))) + below
    return [float(height) for height in apart]


def spread(found: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of the error bars below and above each point, `[2, points]`.

    They are 0 where so few items were answered that there is no interval.
    """
    return [
        [max(0.0, each.value - each.low) * each.has_interval for each in found],
        [max(0.0, each.high - each.value) * each.has_interval for each in found],
    ]


def look(system: System) -> tuple[str, str, str]:
    """Return the colour, the line style and the marker of a system."""
    kind: str = system.drafts if system.drafts in _LOOKS else system.method
    if system.method == "fused":
        kind = system.speculation().transfer
    if system.target_reads == "retrieved":
        kind = "retrieved"
    return _LOOKS.get(kind, ("#444444", "-", "d"))


def bars(curves: Sequence[Curve], what: str, is_ratio: bool) -> Any:
    """Draw a panel per category, with a bar per system."""
    if all(curve.system.method == "plain" for curve in curves):
        return None
    categories = list(dict.fromkeys(x for curve in curves for x, _ in curve.points))
    width, height = 1.3 + 1.8 * len(categories), 1.1 + 0.26 * len(curves)
    figure, axes = pyplot.subplots(
        1, len(categories), figsize=(width, height), sharex=True, sharey=True, squeeze=False
    )
    for axis, category in zip(axes[0], categories, strict=True):
        for place, curve in enumerate(curves):
            found = [each for x, each in curve.points if x == category]
            values = [each.value for each in found]
            places = [place] * len(found)
            axis.barh(places, values, 0.7, color=look(curve.system)[0], alpha=0.6)
            whiskers(axis, values, places, found)
        if is_ratio:
            axis.axvline(1, color="#000000", linewidth=0.8)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_title(f"{category} ({num_items(at(curves, category))})")
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False, axis="y")
    axes[0][0].set(xlim=(0, None), yticks=range(len(curves)))
    axes[0][0].set_yticklabels([curve.name for curve in curves], fontsize=SMALL)
    axes[0][0].invert_yaxis()
    figure.supxlabel(f"{what}\n{WHISKERS}", fontsize=SMALL)
    return figure


def whiskers(
    axis: Any, values: Sequence[float], places: Sequence[int], found: Sequence[Estimate]
) -> None:
    """Draw the ends of horizontal bars, visible at 0 too, and their intervals."""
    axis.errorbar(
        values,
        places,
        xerr=spread(found),
        fmt="o",
        markersize=2.5,
        color="#000000",
        elinewidth=1,
        clip_on=False,
    )
