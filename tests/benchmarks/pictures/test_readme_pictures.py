"""What the result picture of `benchmarks/pictures/readme_pictures.py` says of made-up runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.pictures import readme_pictures
from evaluation.reports.run_results import RunResults
from tests.evaluation.reports.handmade import result, run_dir, task

ROOT = Path(__file__).parents[3]


def run_of(path: Path, fused: Mapping[str, float]) -> RunResults:
    """Return a run whose models alone are never right, and both as `fused` says by length."""
    lines = []
    for start, (length, score) in enumerate(fused.items()):
        for number in range(10 * start, 10 * start + 10):
            groups = {"length": length, "kind": "fact"}
            lines += [
                result(number, "plain", 0.0, groups=groups),
                result(number, "rag-drafter", 0.0, groups=groups),
                result(number, "rapid-adaptive", score, groups=groups),
            ]
    return RunResults.read(run_dir(path, task("plain", "rag-drafter", "rapid-adaptive"), lines))


def test_both_themes_say_the_same_in_other_colours(tmp_path):
    readme_pictures.draw(run_of(tmp_path, {"500": 1.0, "3000": 0.0}), tmp_path / "pictures")
    light = (tmp_path / "pictures" / "result-light.svg").read_text()
    dark = (tmp_path / "pictures" / "result-dark.svg").read_text()
    for text in ("both, fused (RAPID)", "document length, tokens (log scale)", "3,000", "n = 10"):
        assert text in light
    assert light != dark
    for role, colour in readme_pictures.THEMES["light"].items():
        light = light.replace(colour, readme_pictures.THEMES["dark"][role])
    identifiers = r"\bm[0-9a-f]{10}\b"  # hashes of what they name, colours included
    assert re.sub(identifiers, "", light) == re.sub(identifiers, "", dark)


@pytest.mark.parametrize(
    ("fused", "title"),
    [
        ({"500": 1.0, "3000": 0.0}, "Two models together beat each alone at 500 tokens"),
        (
            {"500": 1.0, "1000": 1.0, "3000": 1.0},
            "Two models together beat each alone at 500, 1,000 and 3,000 tokens",
        ),
        (
            {"500": 0.0, "3000": 0.0},
            "Two models together nowhere clearly beat each alone",
        ),
    ],
)
def test_the_title_claims_what_the_intervals_show(tmp_path, fused, title):
    run = run_of(tmp_path, fused)
    assert readme_pictures.claim(run, [int(length) for length in fused]) == title


@pytest.mark.parametrize(
    ("name", "page"), [("how-it-works", "README.md"), ("result", "docs/evaluation.md")]
)
def test_a_page_shows_both_themes_of_each_picture(name: str, page: str):
    for theme in readme_pictures.THEMES:
        picture = f"pictures/{name}-{theme}.svg"
        assert picture in (ROOT / page).read_text()
        assert (ROOT / "docs" / picture).exists()
