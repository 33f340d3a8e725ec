"""`benchmarks/text/auto_on_text.py`: the answer of `auto` is that of one of its two halves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.text import auto_on_text
from benchmarks.text.drafters_word import Asked
from evaluation.drivers.prompter import ShortContext
from evaluation.results import Result
from rapid.messages import Message


def test_auto_has_the_score_of_the_half_that_it_chose() -> None:
    answers = {
        name: Result(item="a", system=name, scores={"contains": score})
        for name, score in {"plain": 0.0, "rapid-adaptive": 1.0, "rag-drafter": 0.0}.items()
    }
    assert auto_on_text.composed(answers, "contains", fuses=True)["auto"] == 1.0
    assert auto_on_text.composed(answers, "contains", fuses=False)["auto"] == 0.0


def chosen(cosine: float, plain: float, fused: float):
    scores = {"plain": plain, "rapid-adaptive": fused, "rag-drafter": fused}
    scores["auto"] = fused if cosine >= 0.39 else plain
    told = ("a", "as is", "one place", 1000, "found")
    return auto_on_text.Chosen(*told, cosine, cosine >= 0.39, scores, scores)


def test_other_thresholds_choose_anew() -> None:
    some = [
        chosen(0.5, plain=1, fused=0),
        chosen(0.7, plain=0, fused=1),
    ]
    lines = auto_on_text.by_threshold(some, [0.4, 0.6, 0.8]).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == [
        "0.500 (1.00)",
        "1.000 (0.50)",
        "0.500 (0.00)",
    ]


def test_a_drafter_that_is_asked_has_the_last_word() -> None:
    both = [chosen(cosine, plain=1, fused=0) for cosine in (0.3, 0.7)]
    both = [replace(each, log_odds=0.4 if each.fuses else None) for each in both]
    assert [each.with_word(0.3).fuses for each in both] == [False, True]
    assert [each.with_word(0.3).scores["auto"] for each in both] == [1, 0]
    assert [each.with_word(0.5).fuses for each in both] == [False, False]
    rows = auto_on_text.by_word(both, [0.3, 0.5]).splitlines()[2:]
    assert [row.split(" | ")[2:4] for row in rows] == [["0.50", "0.500"], ["0.00", "1.000"]]


async def test_words_are_kept_and_not_asked_again(tmp_path: Path) -> None:
    kept = tmp_path / "words.jsonl"
    found = ShortContext((Message("user", "What is it?"),), (), "", None, 0.0)
    words = []
    for model in ("embedded:drafter", "embedded:target"):
        drafter = Asked(model, kept)
        try:
            words.append(await drafter.log_odds("a as is", found))
        finally:
            drafter.close()
    assert words[0] == words[1]
    assert kept.read_text() == f"{json.dumps(['a as is', words[0]])}\n"


def test_the_table_has_the_difference_from_each_half() -> None:
    some = [
        chosen(0.3, plain=1, fused=0),
        chosen(0.7, plain=0, fused=1),
    ]
    row = auto_on_text.by_condition(some).splitlines()[2]
    assert row.startswith("| as is | 2 | 0.50 | right | 1.000 | 0.500 | 0.500 | 0.500 | +0.500")
