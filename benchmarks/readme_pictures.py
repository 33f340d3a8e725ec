"""The two pictures of the README: how a question is answered, and the result of an evaluation.

    python benchmarks/readme_pictures.py

The result is read from the kept run in `benchmarks/results/eval/laptop`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from evaluation.reports.run_results import RunResults
from evaluation.reports.statistics import mean

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "pictures"
TEXT = "#7d8590"  # readable on a light page and on a dark one
SHOWN = {
    "plain": ("target alone, reads everything", "#7d8590", "o"),
    "rag-drafter": ("drafter alone, reads what was retrieved", "#d29922", "s"),
    "rapid-boost": ("fused: both", "#1f9d68", "D"),
}
BOXES = {  # position, size, colour, title, description
    "document": ((0.00, 0.56), (0.17, 0.30), "#7d8590", "document", "and a question"),
    "retriever": ((0.25, 0.10), (0.19, 0.30), "#d29922", "retriever", "finds passages"),
    "drafter": (
        (0.52, 0.10),
        (0.19, 0.30),
        "#d29922",
        "drafter",
        "reads the passages,\ndrafts tokens",
    ),
    "target": (
        (0.52, 0.56),
        (0.19, 0.30),
        "#1f6feb",
        "target",
        "reads everything,\njudges the draft",
    ),
    "answer": ((0.81, 0.56), (0.18, 0.30), "#1f9d68", "answer", "and its receipt"),
}
ARROWS = (
    ("document", "target", ""),
    ("document", "retriever", ""),
    ("retriever", "drafter", ""),
    ("drafter", "target", "a block of drafted tokens"),
    ("target", "answer", "kept"),
)


def main() -> None:
    style = {"svg.hashsalt": "rapid", "svg.fonttype": "none", "font.size": 10}
    style |= dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), TEXT
    )
    DOCS.mkdir(exist_ok=True)
    with matplotlib.rc_context(style):
        how_it_works()
        result()


def how_it_works() -> None:
    figure, axis = pyplot.subplots(figsize=(8.4, 2.6), layout="constrained")
    axis.set(xlim=(-0.01, 1.0), ylim=(0, 1))
    axis.axis("off")
    for place, size, colour, title, what in BOXES.values():
        axis.add_patch(
            FancyBboxPatch(
                place, *size, "round,pad=0.005,rounding_size=0.02", ec=colour, fc="none", lw=1.6
            )
        )
        middle = place[0] + size[0] / 2
        axis.text(middle, place[1] + 0.22, title, ha="center", weight="bold", color=colour)
        axis.text(middle, place[1] + 0.10, what, ha="center", va="center", fontsize=8.5)
    for start, end, label in ARROWS:
        arrow(axis, start, end, label)
    save("how-it-works.svg", figure)


def arrow(axis: Axes, start: str, end: str, label: str) -> None:
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
            *points, arrowstyle="-|>", mutation_scale=12, color=TEXT, connectionstyle=style
        )
    )
    axis.text(where[0], where[1], label, ha=where[2], va=where[3], fontsize=8.5)


def result() -> None:
    run = RunResults.read(ROOT / "benchmarks" / "results" / "eval" / "laptop")
    systems = {system.name: system for system in run.systems}
    lengths = [int(value) for value in run.values_of("length")]
    figure, axis = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    for system, (label, colour, marker) in SHOWN.items():
        by_length = (
            run.of(systems[system], run.conditions[0], str(length)).values() for length in lengths
        )
        found = [mean([run.score(each) for each in results]) for results in by_length]
        values = [each.value for each in found]
        axis.fill_between(
            lengths, [e.low for e in found], [e.high for e in found], color=colour, alpha=0.15, lw=0
        )
        axis.plot(lengths, values, color=colour, marker=marker, label=label)
    axis.set(
        xlabel="length of the document (tokens)",
        ylabel="share of answers that are right",
        ylim=(0, 1.02),
        xticks=lengths,
    )
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(frameon=False, loc="lower left", fontsize=9)
    save("result.svg", figure)


def save(name: str, figure: pyplot.Figure) -> None:
    figure.savefig(DOCS / name, metadata={"Date": None}, transparent=True)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
