from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evaluation.reports.drawing import curves, plots
from evaluation.reports.report import write
from evaluation.reports.run_results import RunResults
from evaluation.results import Result
from evaluation.tasks import Condition, Task
from tests.evaluation.reports.handmade import result, run_dir, task

SVG = "{http://www.w3.org/2000/svg}"


class Picture:
    """What a reader sees of an SVG file."""

    def __init__(self, path: Path) -> None:
        self._root = ElementTree.parse(path).getroot()

    @property
    def heights(self) -> dict[str, float]:
        """Height of each text from the top, in points."""
        return {str(text.text): self._places(text)[1] for text in self._root.iter(f"{SVG}text")}

    @property
    def texts(self) -> list[str]:
        return [str(text.text) for text in self._root.iter(f"{SVG}text")]

    @property
    def ticks(self) -> list[float]:
        """Places of the ticks of all horizontal axes, in points from the left."""
        groups = [g for g in self._root.iter(f"{SVG}g") if g.get("id", "").startswith("xtick")]
        return [float(use.get("x", "")) for g in groups for use in g.iter(f"{SVG}use")]

    @property
    def panels(self) -> int:
        return sum(g.get("id", "").startswith("axes_") for g in self._root.iter(f"{SVG}g"))

    def _places(self, text: ElementTree.Element) -> list[float]:
        moved = re.search(r"translate\(([\d.]+) ([\d.]+)\)", text.get("transform", ""))
        found = moved.groups() if moved else (text.get("x", "nan"), text.get("y", "nan"))
        return [float(number) for number in found]


def drawn(path: Path, name: str, of: Task, lines: Iterable[Result]) -> Picture:
    run = RunResults.read(run_dir(path, of, lines))
    return Picture(plots.draw(run, path / "plots")[name])


def at(length: str, number: int, system: str, score: float, **more) -> Result:
    return result(number, system, score, groups={"length": length, "kind": "fact"}, **more)


def test_the_same_results_make_the_same_files(small):
    def made() -> dict[str, bytes]:
        page = write(small)
        return {p.name: p.read_bytes() for p in [page, *(small / "plots").iterdir()]}

    first = made()
    assert {"accuracy.svg", "speed.svg", "acceptance.svg", "won_and_lost.svg"} < set(first)
    assert made() == first


def test_a_picture_without_results_is_not_drawn(tmp_path):
    run = RunResults.read(run_dir(tmp_path, task("plain"), [result(0, "plain", 1.0)]))
    assert plots.draw(run, tmp_path / "plots") == {}
    assert not (tmp_path / "plots").exists()


def test_lengths_stand_where_they_belong_with_unit_and_number_of_items(tmp_path):
    lines = [
        at(length, number, system, 1.0)
        for number, length in enumerate(["500", "1000", "1000", "4000"])
        for system in ("plain", "rag-target")
    ]
    picture = drawn(tmp_path, "accuracy", task("plain", "rag-target"), lines)
    first, second, third = picture.ticks
    assert (third - second) / (second - first) == pytest.approx(math.log(4) / math.log(2))
    assert "document length, tokens (log scale)" in picture.texts
    assert "answers exactly right, share" in picture.texts
    assert picture.texts[:6] == ["500", "n = 1", "1,000", "n = 2", "4,000", "n = 1"]


def test_categories_have_bars_each_in_a_panel_of_its_own(tmp_path):
    lines = [
        at(length, number, system, 0.5)
        for number, length in enumerate(["short", "long", "long"])
        for system in ("plain", "rag-target", "rag-drafter")
    ]
    picture = drawn(tmp_path, "accuracy", task("plain", "rag-target", "rag-drafter"), lines)
    assert picture.panels == 2
    assert {"short (n = 1)", "long (n = 2)"} < set(picture.texts)
    assert picture.texts.count("rag-target") == 1
    assert picture.heights["plain"] < picture.heights["rag-target"]


def test_systems_that_only_repeat_plain_are_drawn_once(tmp_path):
    scores = {"plain": 0.0, "rag-target": 1.0, "sd": 0.0, "sd-self": 0.0, "magicdec": 1.0}
    lines = [result(n, system, score) for system, score in scores.items() for n in range(2)]
    picture = drawn(tmp_path, "accuracy", task(*scores), lines)
    assert {"plain and", "2 lossless systems", "magicdec"} < set(picture.texts)
    assert not {"sd", "sd-self"} & set(picture.texts)


def test_a_system_that_answered_less_is_told_by_the_number_of_items(tmp_path):
    lines = [at("500", 0, "plain", 1.0)]
    lines += [at("1000", n, system, 1.0) for n in (1, 2) for system in ("plain", "rag-target")]
    lines += [at("1000", 3, "plain", 1.0)]
    assert "n = 2-3" in drawn(tmp_path, "accuracy", task("plain", "rag-target"), lines).texts


def test_names_of_curves_that_end_alike_do_not_overlap(tmp_path):
    systems = ["plain", "rag-target", "rapid-self-boost", "rapid-self-distill", "rapid-self-paper"]
    lines = [result(number, system, 0.0) for number in range(2) for system in systems]
    heights = drawn(tmp_path, "accuracy", task(*systems), lines).heights
    ordered = sorted(heights[system] for system in systems)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > curves.SMALL


def test_speed_says_what_it_is_relative_to(small):
    speed = Picture(plots.draw(RunResults.read(small), small / "plots")["speed"])
    assert "decoding speed, plain = 1 (log scale)" in speed.texts


def test_positions_in_a_block_have_a_unit_and_a_number_of_answers(small):
    accepted = Picture(plots.draw(RunResults.read(small), small / "plots")["acceptance"])
    assert "position in the draft block, tokens (n = 40 answers)" in accepted.texts
    assert "judged drafts accepted, share" in accepted.texts


def test_every_kind_of_retrieval_and_system_has_a_panel_and_none_is_empty(tmp_path):
    kinds = {"as retrieved": "none", "unrelated": "unrelated"}
    conditions = [
        Condition(name=f"{name} {eta}", corruption=kind, eta=eta)
        for name, kind in kinds.items()
        for eta in (0, 5, 20)
    ]
    systems = ("plain", "rapid-distill", "rapid-boost", "rapid-self-boost")
    of = task(*systems, conditions=conditions)
    lines = [result(0, system, 1.0, each.name) for each in conditions for system in systems]
    picture = drawn(tmp_path, "eta", of, lines)
    assert picture.panels == 2 * 3
    assert {"as retrieved (n = 1)", "unrelated (n = 1)"} < set(picture.texts)
    assert set(systems) < set(picture.texts)
    first, second, third = picture.ticks[:3]
    assert (third - second) / (second - first) == pytest.approx(15 / 5, rel=1e-3)


def test_shares_of_items_lost_are_not_negative(small):
    run = RunResults.read(small)
    picture = Picture(plots.draw(run, small / "plots")["won_and_lost"])
    assert {"worse than plain", "better than plain", "share of items (n = 40)"} < set(picture.texts)
    numbers = [text for text in picture.texts if re.fullmatch(r"[-\N{MINUS SIGN}]?[\d.]+", text)]
    assert numbers
    assert all(text[0].isdigit() for text in numbers)
