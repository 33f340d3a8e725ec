from __future__ import annotations

import json

import pytest

from evaluation.loaders import load_items
from rapid.errors import ConfigurationError
from tests.evaluation.benchmark_files import BENCHMARKS, task_with


def test_a_dialogue_ends_in_its_own_turns_under_others_as_history():
    task = task_with("dialogue", queries=2, padding=4, history_tokens=500)
    items = load_items(task, BENCHMARKS)
    lines = (BENCHMARKS / "mtbench101.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [item.id for item in items] == [f"{r['task']}-{r['id']}" for r in records[:2]]
    for item in items:
        own = next(r for r in records if item.id == f"{r['task']}-{r['id']}")
        assert item.messages[-1].role == "user"
        assert item.messages[-1].content == own["history"][-1]["user"]
        assert item.messages[-2].content == own["history"][-2]["bot"]
        assert item.answers == (own["history"][-1]["bot"],)
        padding = item.messages[: -(2 * len(own["history"]) - 1)]
        assert [turn.role for turn in padding] == ["user", "assistant"] * (len(padding) // 2)
        assert padding
        assert sum(len(turn.content) for turn in item.messages) <= 500 * 4.5
        assert own["history"][0]["user"] in item.fields["dialogue"]
        assert padding[0].content not in item.fields["dialogue"]
    assert items == load_items(task, BENCHMARKS)


def test_queries_are_not_padded_from_each_other():
    items = load_items(task_with("dialogue", queries=5, padding=3), BENCHMARKS)
    asked = {item.messages[-1].content for item in items}
    for item in items:
        assert not asked & {turn.content for turn in item.messages[:-1]}


def test_an_option_that_the_loader_does_not_have_is_refused():
    with pytest.raises(ConfigurationError, match=r"(?s)source\.options of dialogues.*lenght"):
        load_items(task_with("dialogue", lenght="long"), BENCHMARKS)
