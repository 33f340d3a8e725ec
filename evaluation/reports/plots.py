"""Plots of a run, as SVG that is identical for identical results.

Colours are those of Okabe and Ito ("Color Universal Design", 2008), which colour-blind readers can
distinguish, and one of Tol's; line styles and markers carry the same distinction. Numbers have
numeric axes, categories have bars. Whiskers are 95 % intervals over items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported, so that no display is needed

import numpy as np
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

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
from evaluation.tasks import Condition

_STYLE: Any = {
    "svg.hashsalt": "rapid",
    "svg.fonttype": "none",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "axes.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "lines.markersize": 4,
    "figure.constrained_layout.use": True,
}
SMALL = 8  # points, the smallest that a page of 900 pixels leaves readable
_ASIDE = 1.8  # points from curve to curve
WHISKERS = "whiskers: 95 % intervals, bootstrap over items"
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
_UNITS = {"length": "document length, tokens"}
_SCORES = {"exact": "answers exactly right, share"}


@dataclass(frozen=True)
class Curve:
    """A system's estimates by number or category, in ascending order.

    Attributes:
        system: The system.
        name: What it is called in the plot.
        points: The estimates, each with its number or category.
    """

    system: System
    name: str
    points: Sequence[tuple[str, Estimate]]


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
    """Draw the score by the first group; systems that only repeat `plain` share its curve."""
    repeated = _repeating_plain(run)
    shown = [system for system in run.systems if system not in repeated]
    curves = _by_column(run, shown, lambda _, results: run.scores(results))
    return _by_first_group(run, curves, _score(run))


def _repeating_plain(run: RunResults) -> list[System]:
    """Return the lossless systems that score exactly as `plain` does on every item."""
    if run.plain is None:
        return []
    base = _scores_of(run, run.plain)
    lossless = [system for system in run.systems if system.method == "lossless"]
    return [system for system in lossless if _scores_of(run, system) == base]


def _scores_of(run: RunResults, system: System) -> dict[str, float]:
    return {item: run.score(result) for item, result in run.headline(system).items()}


def _score(run: RunResults) -> str:
    metric = run.task.metrics[0]
    return _SCORES.get(metric, f"mean score, {metric} (0 to 1)")


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
    if plain is None:
        return _by_first_group(run, curves, "decoding, tokens per second")
    return _by_first_group(run, curves, "decoding speed, plain = 1", is_ratio=True)


def _by_column(
    run: RunResults,
    systems: Sequence[System],
    estimate: Callable[[str, ByItem], Estimate | None],
) -> list[Curve]:
    curves: list[Curve] = []
    repeated = len([system for system in _repeating_plain(run) if system not in systems])
    for system in systems:
        points = []
        for column in run.columns[1:] or run.columns:
            found = estimate(column, run.headline(system, column))
            if found is not None:
                points.append((column, found))
        if points:
            name = system.name
            if system == run.plain and repeated:
                name += f" and\n{repeated} lossless system{'s' if repeated > 1 else ''}"
            curves.append(Curve(system, name, points))
    return curves


def _by_first_group(
    run: RunResults, curves: Sequence[Curve], what: str, is_ratio: bool = False
) -> Any:
    """Draw curves over a logarithmic axis if the group's values are numbers, else bars."""
    values = run.columns[1:]
    if len(values) < 2 or not all(value.isdigit() and int(value) for value in values):
        return _bars(curves, what, is_ratio)
    group = run.task.groups[0]
    figure = _two_panels(run, curves, what + (" (log scale)" if is_ratio else ""))
    for axis in figure.axes if figure else ():
        axis.set(xscale="log", xlabel=f"{_UNITS.get(group, group)} (log scale)")
        axis.set_xlim(int(values[0]) / 1.2, int(values[-1]) * 1.2)
        ticks = [f"{int(value):,}\n{_n(_at(curves, value))}" for value in values]
        axis.set_xticks([int(value) for value in values], ticks)
        axis.xaxis.set_minor_locator(NullLocator())
        if is_ratio:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axis.yaxis.set_minor_formatter(FuncFormatter(_two_and_five))
        else:
            axis.set_ylim(bottom=0)
    return _finished(figure)


def _two_and_five(y: float, _: object) -> str:
    return f"{y:g}" if f"{y:e}"[0] in "25" else ""


def _n(found: Iterable[Estimate]) -> str:
    """Say of how many items the estimates are made."""
    counts = {each.items for each in found}
    least, most = min(counts), max(counts)
    return f"n = {most}" if least == most else f"n = {least}-{most}"


def _at(curves: Sequence[Curve], x: str) -> list[Estimate]:
    return [each for curve in curves for place, each in curve.points if place == x]


def _two_panels(run: RunResults, curves: Sequence[Curve], what: str) -> Any:
    """Draw systems with one model on the left, with two on the right, and `plain` in both."""
    panels = {
        "one model: the target": [each for each in curves if each.system.drafts not in _UPWARD],
        "two models: target and drafter": [
            each for each in curves if each.system.drafts in _UPWARD
        ],
    }
    plain = [curve for curve in curves if curve.system == run.plain]
    panels = {title: _with_plain(plain, panel) for title, panel in panels.items()}
    panels = {title: panel for title, panel in panels.items() if panel}
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


def _with_plain(plain: list[Curve], panel: list[Curve]) -> list[Curve]:
    others = [curve for curve in panel if curve not in plain]
    return [*plain, *others] if others else []


def _line(axis: Any, curve: Curve, aside: float) -> None:
    """Draw a curve, moved `aside` by so many points that its whiskers are told from others'."""
    colour, line, marker = _look(curve.system)
    found = [estimate for _, estimate in curve.points]
    drawn = axis.errorbar(
        [float(x) for x, _ in curve.points],
        [estimate.value for estimate in found],
        _spread(found),
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


def _finished(figure: Any) -> Any:
    """Write the names of the curves beside their ends."""
    if figure is None:
        return None
    figure.supxlabel(WHISKERS, fontsize=SMALL)
    for axis in figure.axes:
        lines = [(each.get_label(), each.lines[0]) for each in axis.containers]
        label_ends(axis, lines)
    return figure


def label_ends(axis: Any, lines: Sequence[tuple[str, Any]]) -> None:
    """Write the names of lines right of a panel, each as near to its line's end as it fits.

    Args:
        axis: The panel, with its final limits.
        lines: Names, which may have several lines of text, and matplotlib's lines.
    """
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
    return _LOOKS.get(kind, ("#444444", "-", "d"))


def _bars(curves: Sequence[Curve], what: str, is_ratio: bool) -> Any:
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
            axis.barh(places, values, 0.7, color=_look(curve.system)[0], alpha=0.6)
            _whiskers(axis, values, places, found)
        if is_ratio:
            axis.axvline(1, color="#000000", linewidth=0.8)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_title(f"{category} ({_n(_at(curves, category))})")
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False, axis="y")
    axes[0][0].set(xlim=(0, None), yticks=range(len(curves)))
    axes[0][0].set_yticklabels([curve.name for curve in curves], fontsize=SMALL)
    axes[0][0].invert_yaxis()
    figure.supxlabel(f"{what}\n{WHISKERS}", fontsize=SMALL)
    return figure


def _whiskers(
    axis: Any, values: Sequence[float], places: Sequence[int], found: Sequence[Estimate]
) -> None:
    """Draw the ends of horizontal bars, visible at 0 too, and their intervals."""
    axis.errorbar(
        values,
        places,
        xerr=_spread(found),
        fmt="o",
        markersize=2.5,
        color="#000000",
        elinewidth=1,
        clip_on=False,
    )


def _eta(run: RunResults) -> Any:
    """Draw the score by eta, with a column per kind of retrieval and a row per system.

    Systems that eta does not change are horizontal lines.
    """
    systems = [system for system in run.systems if system.fuses]
    families = run.families
    if not families or not systems:
        return None
    figure, axes = pyplot.subplots(
        len(systems),
        len(families),
        figsize=(1.4 + 1.8 * len(families), 0.9 + 1.5 * len(systems)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for row, system in zip(axes, systems, strict=True):
        for axis, members in zip(row, families.values(), strict=True):
            _eta_panel(axis, run, system, members)
        row[0].set_ylabel(system.name)
    axes[0][0].set(ylim=(0, 1.02), yticks=(0, 0.5, 1))
    for axis, (name, members) in zip(axes[0], families.items(), strict=True):
        found = [run.scores(run.of(system, each)) for system in systems for each in members]
        axis.set_title(f"{name} ({_n(each for each in found if each)})")
    for row in axes:
        label_ends(row[-1], [(each.get_label(), each) for each in row[-1].get_lines()[1:]])
    figure.supylabel(_score(run), fontsize=9)
    figure.supxlabel(
        "eta, the strength of the transfer (a number without unit)\n"
        "bands: 95 % intervals, bootstrap over items",
        fontsize=SMALL,
    )
    return figure


def _eta_panel(axis: Any, run: RunResults, system: System, members: Sequence[Condition]) -> None:
    etas = [each.eta for each in members]
    scores = [run.scores(run.of(system, each)) for each in members]
    points = [(eta, score) for eta, score in zip(etas, scores, strict=True) if score]
    colour, _, marker = _look(system)
    places = [eta for eta, _ in points]
    lows, highs = [score.low for _, score in points], [score.high for _, score in points]
    values = [score.value for _, score in points]
    axis.plot(places, values, color=colour, marker=marker, clip_on=False)
    axis.fill_between(places, lows, highs, color=colour, alpha=0.2, linewidth=0)
    for other in run.systems:
        level = run.scores(run.of(other, members[0]))
        if level and other.method in ("plain", "rag"):
            look = _look(other)
            axis.plot(
                [etas[0], etas[-1]],
                [level.value] * 2,
                color=look[0],
                linestyle="--" if other.method == "plain" else ":",
                linewidth=1.2,
                label=other.name,
                clip_on=False,
            )
    axis.set_xticks(etas)
    axis.label_outer(remove_inner_ticks=True)


def _acceptance(run: RunResults) -> Any:
    """Draw the share of judged drafts that were accepted, by position in the block."""
    curves: list[Curve] = []
    for system in run.systems:
        results = run.headline(system)
        longest = max((len(each.by_position) for each in results.values()), default=0)
        points = [(str(i + 1), acceptance_at(results, i)) for i in range(longest)]
        known = [(x, estimate) for x, estimate in points if estimate is not None]
        if known:
            curves.append(Curve(system, system.name, known))
    figure = _two_panels(run, curves, "judged drafts accepted, share")
    for axis in figure.axes if figure else ():
        axis.set_xlabel(f"position in the draft block, tokens ({_n(_at(curves, '1'))} answers)")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(top=1.01)
    return _finished(figure)


def _won_and_lost(run: RunResults) -> Any:
    """Draw the shares of items scored below plain (to the left) and above, as Figure 2 does.

    The hatched part of a bar are the items that its own RAG scores no better, or no worse, either.
    """
    if run.plain is None:
        return None
    base = run.headline(run.plain)
    repeated = [run.plain, *_repeating_plain(run)]
    shown: list[tuple[System, Estimate, Estimate]] = []
    for system in run.systems:
        both = won_and_lost(run, run.headline(system), base)
        if both and system not in repeated:
            shown.append((system, *both))
    if not shown:
        return None
    figure, (below, above) = pyplot.subplots(
        1, 2, figsize=(7.4, 1.1 + 0.26 * len(shown)), sharey=True
    )
    for place, (system, won, lost) in enumerate(shown):
        for axis, each, colour in ((below, lost, "#D55E00"), (above, won, "#0072B2")):
            axis.barh(place, each.value, 0.7, color=colour, alpha=0.6)
            _whiskers(axis, [each.value], [place], [each])
        rag = run.rag_of(system)
        alone = rag and won_and_lost(run, run.headline(system), base, run.headline(rag))
        for axis, each in zip((above, below), alone or (), strict=False):
            axis.barh(place, each.value, 0.7, fill=False, hatch="////", edgecolor="#FFFFFF")
    most = 1.05 * max(each.high for _, *both in shown for each in both) or 1.0
    below.set(title=f"worse than {run.plain.name}", xlim=(most, 0))
    above.set(title=f"better than {run.plain.name}", xlim=(0, most))
    below.set_yticks(range(len(shown)), [system.name for system, _, _ in shown], fontsize=SMALL)
    below.invert_yaxis()
    below.spines[["left", "right"]].set_visible([False, True])
    for axis in (below, above):
        axis.tick_params(axis="y", length=0)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid(visible=False, axis="y")
    n = _n(won for _, won, _ in shown)
    hatched = "hatched: its drafting model alone is not as good, or not as bad"
    figure.supxlabel(f"share of items ({n})\n{hatched}\n{WHISKERS}", fontsize=SMALL)
    return figure
