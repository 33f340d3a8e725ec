from __future__ import annotations

import json

import pytest

from evaluation.loaders import load_items
from evaluation.tasks import load_task
from rapid.errors import ConfigurationError
from tests.evaluation.benchmark_files import BENCHMARKS, task_with


def test_longbench_items_in_the_official_format():
    items = load_items(load_task("longbench-v2"), BENCHMARKS / "data.json")
    assert [item.id for item in items] == ["fixture00", "fixture01", "fixture02", "fixture03"]
    first = items[0]
    record = json.loads((BENCHMARKS / "data.json").read_text())[0]
    assert first.document is not None
    assert first.document.text == record["context"]
    assert first.answers == (record["answer"],)
    assert first.messages[-1].content.startswith(f"{record['question']}\n(A) {record['choice_A']}")
    assert first.groups == {
        "difficulty": "easy",
        "length": "short",
        "domain": "Single-Document QA",
        "sub_domain": "Legal",
    }


@pytest.mark.parametrize(
    ("question", "query"),
    [
        ("Who?", "Who?\nChoices:\n(A) Ada\n(B) Bea\n(C) Cid\n(D) Dan"),
        ("Read on.\n\nWho?", "Read on."),  # a blank line ends it, whatever comes after
    ],
)
def test_retrieval_searches_with_the_question_and_its_choices(tmp_path, question, query):
    record = json.loads((BENCHMARKS / "data.json").read_text())[0]
    choices = {"choice_A": "Ada ", "choice_B": "Bea", "choice_C": "Cid", "choice_D": "Dan"}
    (tmp_path / "data.json").write_text(json.dumps([record | choices | {"question": question}]))
    (item,) = load_items(load_task("longbench-v2"), tmp_path / "data.json")
    assert item.query == query


def test_the_robustness_task_takes_the_long_items_alone():
    items = load_items(load_task("robustness"), BENCHMARKS)  # data.json of a directory
    assert [item.id for item in items] == ["fixture02", "fixture03"]


def test_an_option_that_the_loader_does_not_have_is_refused():
    with pytest.raises(ConfigurationError, match=r"(?s)source\.options of LongBench v2.*lenght"):
        load_items(task_with("longbench-v2", lenght="long"), BENCHMARKS)
