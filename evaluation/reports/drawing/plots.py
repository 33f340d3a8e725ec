"""Plots of a run, as SVG that is identical for identical results.

Numbers have numeric axes, categories have bars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported, so that no display is needed

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from evaluation.reports.drawing.curves import (
    SMALL,
    WHISKERS,
    Curve,
    at,
    bars,
    finish,
    label_ends,
    look,
    num_items,
    spread,
    two_panels,
    whiskers,
)
from evaluation.reports.estimates import Estimate
from evaluation.reports.run_results import (
    ByItem,
    RunResults,
    acceptance_at,
    estimate_wins,
    speedup,
    tokens_per_second,
)
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
_UNITS = {"length": "document length, tokens"}
_SCORES = {"exact": "answers exactly right, share"}


def draw(run: RunResults, out_dir: Path) -> dict[str, Path]:
    """Draw every plot that the run has results for, and return its files in `out_dir` by name."""
    pictures = {
        "accuracy": _accuracy,
        "speed": _speed,
        "eta": _eta,
        "acceptance": _acceptance,
        "won_and_lost": _draw_wins,
    }
    made: dict[str, Path] = {}
    with pyplot.rc_context(_STYLE):
        for name, picture in pictures.items():
            figure = picture(run)
            if figure is not None:
                if name != "eta" and len(run.conditions) > 1:  # it alone shows them all
                    figure.suptitle(f"retrieval: {run.conditions[0].name}", fontsize=9)
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
        return bars(curves, what, is_ratio)
    group = run.task.groups[0]
    figure = two_panels(run, curves, what + (" (log scale)" if is_ratio else ""))
    for axis in figure.axes if figure else ():
        axis.set(xscale="log", xlabel=f"{_UNITS.get(group, group)} (log scale)")
        axis.set_xlim(int(values[0]) / 1.2, int(values[-1]) * 1.2)
        ticks = [f"{int(value):,}\n{num_items(at(curves, value))}" for value in values]
        axis.set_xticks([int(value) for value in values], ticks)
        axis.xaxis.set_minor_locator(NullLocator())
        if is_ratio:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axis.yaxis.set_minor_formatter(FuncFormatter(_two_and_five))
        else:
            axis.set_ylim(bottom=0)
    return finish(figure)


def _two_and_five(y: float, _: object) -> str:
    return f"{y:g}" if f"{y:e}"[0] in "25" else ""


def _eta(run: RunResults) -> Any:
    """Draw the score by eta, with a column per kind of retrieval and a row per system.

    The controls are left out: they have the eta of what they control, or that of the plain mean.
    """
    systems = [
        system
        for system in run.systems
        if system.fuses and system.reads_everything and system.transfer != "mixture"
    ]
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
        axis.set_title(f"{name} ({num_items(each for each in found if each)})")
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
    colour, _, marker = look(system)
    places = [eta for eta, _ in points]
    values = [score.value for _, score in points]
    below, above = spread([score for _, score in points])
    lows = [value - length for value, length in zip(values, below, strict=True)]
    highs = [value + length for value, length in zip(values, above, strict=True)]
    axis.plot(places, values, color=colour, marker=marker, clip_on=False)
    axis.fill_between(places, lows, highs, color=colour, alpha=0.2, linewidth=0)
    for other in run.systems:
        level = run.scores(run.of(other, members[0]))
        if level and other.method in ("plain", "rag"):
            its = look(other)
            axis.plot(
                [etas[0], etas[-1]],
                [level.value] * 2,
                color=its[0],
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
    figure = two_panels(run, curves, "judged drafts accepted, share")
    for axis in figure.axes if figure else ():
        axis.set_xlabel(
            f"position in the draft block, tokens ({num_items(at(curves, '1'))} answers)"
        )
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(top=1.01)
    return finish(figure)


def _draw_wins(run: RunResults) -> Any:
    """Draw the shares of items scored below plain (to the left) and above, as Figure 2 does."""
    if run.plain is None:
        return None
    base = run.headline(run.plain)
    repeated = [run.plain, *_repeating_plain(run)]
    shown: list[tuple[System, Estimate, Estimate]] = []
    for system in run.systems:
        both = estimate_wins(run, run.headline(system), base)
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
            whiskers(axis, [each.value], [place], [each])
        rag = run.rag_of(system)
        alone = rag and estimate_wins(run, run.headline(system), base, run.headline(rag))
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
    n = num_items(won for _, won, _ in shown)
    hatched = "hatched: its drafting model alone is not as good, or not as bad"
    figure.supxlabel(f"share of items ({n})\n{hatched}\n{WHISKERS}", fontsize=SMALL)
    return figure
