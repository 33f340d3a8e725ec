"""Items on real text, from the package alone."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from evaluation.loaders import load_items
from evaluation.loaders.real_text import NOT_IN_THE_TEXT, split_of
from evaluation.scorers import contains
from evaluation.tasks import Task, load_task
from evaluation.texts.text_questions import document_names, questions_of
from rapid.errors import ConfigurationError


def task(**source: object) -> Task:
    """Return the task with another source, which asks every question if not told otherwise."""
    of_package = load_task("real-text")
    changed = of_package.source.model_copy(update={"options": {}} | source)
    return of_package.model_copy(update={"source": changed})


def test_an_item_has_its_document_its_evidence_and_every_spelling_of_its_answer():
    items = {item.id: item for item in load_items(task()) + load_items(task(split="dev"))}
    for name in document_names():
        for question in questions_of(name):
            item = items[question.id]
            assert item.document is not None
            assert len(item.evidence) == len(question.evidence)
            for (start, end), passage in zip(item.evidence, question.evidence, strict=True):
                assert item.document.text[start:end].split() == passage.split()
            if question.kind == "unanswerable":
                assert item.answers == NOT_IN_THE_TEXT
            else:
                assert all(contains(answer, item) == 1.0 for answer in item.answers)
                assert contains("not in the text", item) == 0.0


def test_no_document_is_in_two_splits_and_questions_about_one_come_together():
    dev, test = (load_items(task(split=split)) for split in ("dev", "test"))
    of_dev, of_test = ({item.id.rpartition("-")[0] for item in each} for each in (dev, test))
    assert not of_dev & of_test
    assert len(test) > 2 * len(dev) > 0
    names = [name for name, _ in groupby(item.id.rpartition("-")[0] for item in test)]
    assert len(names) == len(set(names))
    assert {split_of(name) for name in of_dev} == {"dev"}


def test_options_choose_kinds_and_how_many_of_a_document():
    chosen = load_items(task(options={"kinds": ["paraphrase"], "per_document": 1}))
    assert {item.groups["kind"] for item in chosen} == {"paraphrase"}
    assert len(chosen) == len({item.id.rpartition("-")[0] for item in chosen})


@pytest.mark.parametrize(
    ("source", "data", "told"),
    [
        ({"split": "train"}, None, "splits dev, test"),
        ({"options": {"kinds": []}}, None, "kinds"),
        ({}, Path("x.json"), "drop --data"),
    ],
)
def test_what_cannot_be_loaded_is_told(source, data, told):
    with pytest.raises(ConfigurationError, match=told):
        load_items(task(**source), data)
