"""The numbers of `benchmarks/evidence.py`, on vectors given by hand."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from evaluation.items import Item
from rapid.messages import Document, Message

FOLDER = Path(__file__).parents[2] / "benchmarks"
COSINES = {"own": [0.9, 0.1, 0.2], "asked": [0.5, 0.1, 0.3], "third": [0.4, 0.0], "fourth": [0.2]}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(FOLDER))  # for `recall` and `reporting`
    try:
        return importlib.import_module("evidence")
    finally:
        sys.path.remove(str(FOLDER))


def reader(script: ModuleType) -> SimpleNamespace:
    """Texts whose passages have the cosines of `COSINES` with any question."""

    def read(text: str):
        vectors = np.asarray(COSINES[text], dtype=np.float32)[:, None]
        return script.Passages(vectors, vectors, [Counter(["copper", "mine"])] * len(vectors))

    return SimpleNamespace(
        read=read,
        passages=lambda text: read(text).vectors,
        vectors=lambda texts: np.ones((len(texts), 1), dtype=np.float32),
        any_text=np.full((7, 1), 0.25, dtype=np.float32),
    )


def test_the_field_is_neither_the_document_that_answers_nor_the_one_that_is_asked(script):
    question = "Who sold the copper?"
    item = Item("", (Message("user", question),), Document("asked", "asked"), ())
    such = {name: name for name in COSINES}
    numbers = script.numbers_of(
        script.Asked("elsewhere", question, item), "own", such, reader(script)
    )
    assert numbers["cosine"] == pytest.approx(0.5)
    assert numbers["margin"] == pytest.approx(0.2)
    assert numbers["parts"] == pytest.approx(0.3)
    assert numbers["such text"] == pytest.approx((0.4 + 0.2) / 2)
    assert numbers["cosine - any text"] == pytest.approx(0.25)
    assert 0 < numbers["words"] < 1  # of "sold" and "copper" the best passage has one


def test_a_line_counts_what_passes_where_nine_in_ten_answered_questions_do(script):
    kinds = ["one place"] * 9 + ["paraphrase", "elsewhere", "elsewhere", "unanswerable"]
    values = [*range(1, 10), 0, 5, 0.5, 8]
    name, area, passed, *_, kept = script.row("cosine", kinds, values)
    assert (name, area) == ("cosine", "0.675")
    assert passed.startswith("0.50 ")
    assert kept == "0.00"
