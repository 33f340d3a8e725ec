"""Two pictures: how a question is answered (README), and the result of `make eval` (evaluation).

    python -m benchmarks.pictures.readme_pictures

Each is made for light and for dark pages. The result is read from the kept run in
`benchmarks/results/eval/laptop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from benchmarks.reporting import ROOT

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import NullLocator

from evaluation.reports.drawing.curves import SMALL, WHISKERS, label_ends
from evaluation.reports.run_results import RunResults

KEPT = ROOT / "benchmarks" / "results" / "eval" / "laptop"
DOCS = ROOT / "docs" / "pictures"
# Of 4.5 to 1 in contrast with their page, and told apart by colour-blind readers.
THEMES = {
    "light": {"text": "#1f2328", "target": "#0969da", "drafter": "#bc4c00", "grid": "#d1d9e0"},
    "dark": {"text": "#f0f6fc", "target": "#58a6ff", "drafter": "#f0883e", "grid": "#3d444d"},
}
STYLE = {
    "svg.hashsalt": "rapid",
    "svg.fonttype": "none",
    "font.size": 10,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
}
SHOWN = {  # label, colour, marker, line width
    "plain": ("target alone,\nreads everything", "target", "o", 1.5),
    "rag-drafter": ("drafter alone, reads\nwhat was retrieved", "drafter", "s", 1.5),
    "rapid-adaptive": ("both, fused (RAPID)", "text", "D", 2.5),
}
BOXES = {  # position, size, colour, title, description
    "document": ((0.00, 0.56), (0.17, 0.30), "text", "document", "and a question"),
    "retriever": ((0.25, 0.10), (0.19, 0.30), "drafter", "retriever", "finds passages"),
    "drafter": (
        (0.52, 0.10),
        (0.19, 0.30),
        "drafter",
        "drafter",
        "reads the passages,\ndrafts tokens",
    ),
    "target": (
        (0.52, 0.56),
        (0.19, 0.30),
        "target",
        "target",
        "reads everything,\njudges the draft",
    ),
    "answer": ((0.81, 0.56), (0.18, 0.30), "text", "answer", "and its receipt"),
}
ARROWS = (
    ("document", "target", ""),
    ("document", "retriever", ""),
    ("retriever", "drafter", ""),
    ("drafter", "target", "a block of drafted tokens"),
    ("target", "answer", "kept"),
)


def main() -> None:
    draw(RunResults.read(KEPT), DOCS)


def draw(run: RunResults, out_dir: Path) -> None:
    """Draw both pictures for both themes in `out_dir`."""
    for name, theme in THEMES.items():
        coloured = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
        style = STYLE | dict.fromkeys(coloured, theme["text"]) | {"grid.color": theme["grid"]}
        with matplotlib.rc_context(style):
            save(how_it_works(theme), out_dir / f"how-it-works-{name}.svg")
            save(result(run, theme), out_dir / f"result-{name}.svg")


def how_it_works(theme: dict[str, str]) -> Figure:
    figure, axis = pyplot.subplots(figsize=(8.4, 2.4), layout="constrained")
    axis.set(xlim=(-0.01, 1.0), ylim=(0.07, 0.9))
    axis.axis("off")
    for place, size, role, title, what in BOXES.values():
        colour = theme[role]
        axis.add_patch(
            FancyBboxPatch(
                place, *size, "round,pad=0.005,rounding_size=0.02", ec=colour, fc="none", lw=1.6
            )
        )
        middle = place[0] + size[0] / 2
        axis.text(middle, place[1] + 0.22, title, ha="center", weight="bold", color=colour)
        axis.text(middle, place[1] + 0.10, what, ha="center", va="center", fontsize=9)
    for start, end, label in ARROWS:
        arrow(axis, start, end, label, theme["text"])
    return figure


def arrow(axis: Axes, start: str, end: str, label: str, colour: str) -> None:
    (x0, y0), (w0, h0) = BOXES[start][:2]
    (x1, y1), (w1, h1) = BOXES[end][:2]
    if x0 == x1:  # upwards
        points = (x0 + w0 / 2, y0 + h0 + 0.02), (x1 + w1 / 2, y1 - 0.02)
        where = (points[0][0] + 0.012, (points[0][1] + points[1][1]) / 2, "left", "center")
    elif y0 == y1:
        points = (x0 + w0 + 0.01, y0 + h0 / 2), (x1 - 0.01, y1 + h1 / 2)
        where = ((points[0][0] + points[1][0]) / 2, points[0][1] + 0.05, "center", "bottom")
    else:
        points = (x0 + w0 / 2, y0 - 0.02), (x1 - 0.01, y1 + h1 / 2)
        where = (points[0][0], points[0][1], "center", "center")
    style = "angle,angleA=-90,angleB=180,rad=8" if y0 > y1 else "arc3"
    axis.add_patch(
        FancyArrowPatch(
            *points, arrowstyle="-|>", mutation_scale=12, color=colour, connectionstyle=style
        )
    )
    axis.text(where[0], where[1], label, ha=where[2], va=where[3], fontsize=9)


def result(run: RunResults, theme: dict[str, str]) -> Figure:
    """Draw the scores by document length, and say in the title where fusing wins."""
    systems = {system.name: system for system in run.systems}
    lengths = [int(value) for value in run.values_of("length")]
    figure, axis = pyplot.subplots(figsize=(7.6, 3.8), layout="constrained")
    lines = []
    for number, (system, (label, role, marker, width)) in enumerate(SHOWN.items()):
        found = [run.scores(run.headline(systems[system], str(length))) for length in lengths]
        scores = [(length, each) for length, each in zip(lengths, found, strict=True) if each]
        drawn = axis.errorbar(
            [length * 1.015 ** (number - 1) for length, _ in scores],  # whiskers side by side
            [each.value for _, each in scores],
            [
                [each.value - each.low for _, each in scores],
                [each.high - each.value for _, each in scores],
            ],
            color=theme[role],
            marker=marker,
            linewidth=width,
            elinewidth=1.2,
        )
        lines.append((label, drawn.lines[0]))
    axis.set(xscale="log", xlim=(lengths[0] / 1.1, lengths[-1] * 1.1), ylim=(0, 1.02))
    counts = [len(run.headline(systems["plain"], str(length))) for length in lengths]
    ticks = [f"{length:,}\nn = {n}" for length, n in zip(lengths, counts, strict=True)]
    axis.set_xticks(lengths, ticks)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("document length, tokens (log scale); n: documents")
    axis.set_ylabel("answers exactly right, share")
    axis.set_title(claim(run, lengths), loc="left", fontsize=11, weight="bold")
    axis.grid(visible=True, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"generated documents; {WHISKERS}", fontsize=SMALL + 1)
    label_ends(axis, lines)
    return figure


def claim(run: RunResults, lengths: Sequence[int]) -> str:
    """Say at which lengths fused answers are better than those of each model alone.

    The whole 95 % interval of both paired differences is above zero there.
    """
    alone, retrieved, fused = (
        next(system for system in run.systems if system.name == name) for name in SHOWN
    )
    won: list[str] = []
    for length in lengths:
        ours = run.headline(fused, str(length))
        others = (run.headline(other, str(length)) for other in (alone, retrieved))
        found = [run.difference(ours, theirs) for theirs in others]
        if all(each is not None and each.sign > 0 for each in found):
            won.append(f"{length:,}")
    if not won:
        return "Two models together nowhere clearly beat each alone"
    at = " and ".join([", ".join(won[:-1]), won[-1]]) if won[1:] else won[0]
    return f"Two models together beat each alone at {at} tokens"


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, transparent=True)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
