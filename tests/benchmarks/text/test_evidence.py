"""The numbers of `benchmarks/text/evidence.py`, on vectors given by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.text import evidence
from evaluation.items import Item
from rapid.messages import Document, Message

COSINES = {"own": [0.9, 0.1, 0.2], "asked": [0.5, 0.1, 0.3], "third": [0.4, 0.0], "fourth": [0.2]}


def reader() -> SimpleNamespace:
    """Texts whose passages have the cosines of `COSINES` with any question."""

    def read(text: str):
        vectors = np.asarray(COSINES[text], dtype=np.float32)[:, None]
        return evidence.Passages(vectors, vectors, [Counter(["copper", "mine"])] * len(vectors))

    return SimpleNamespace(
        read=read,
        passages=lambda text: read(text).vectors,
        vectors=lambda texts: np.ones((len(texts), 1), dtype=np.float32),
        any_text=np.full((7, 1), 0.25, dtype=np.float32),
    )


def test_the_field_is_neither_the_document_that_answers_nor_the_one_that_is_asked():
    question = "Who sold the copper?"
    item = Item("", (Message("user", question),), Document("asked", "asked"), ())
    such = {name: name for name in COSINES}
    numbers = evidence.numbers_of(
        evidence.Asked("elsewhere", question, item), "own", such, reader()
    )
    assert numbers["cosine"] == pytest.approx(0.5)
    assert numbers["margin"] == pytest.approx(0.2)
    assert numbers["parts"] == pytest.approx(0.3)
    assert numbers["such text"] == pytest.approx((0.4 + 0.2) / 2)
    assert numbers["cosine - any text"] == pytest.approx(0.25)
    assert 0 < numbers["words"] < 1  # of "sold" and "copper" the best passage has one


def test_a_line_counts_what_passes_where_nine_in_ten_answered_questions_do():
    kinds = ["one place"] * 9 + ["paraphrase", "elsewhere", "elsewhere", "unanswerable"]
    values = [*range(1, 10), 0, 5, 0.5, 8]
    name, area, passed, *_, kept = evidence.row("cosine", kinds, values)
    assert (name, area) == ("cosine", "0.675")
    assert passed.startswith("0.50 ")
    assert kept == "0.00"
