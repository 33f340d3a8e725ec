from __future__ import annotations

import json

import pytest

from evaluation.loaders import load_items
from evaluation.tasks import load_task
from rapid.errors import ConfigurationError
from tests.evaluation.benchmark_files import BENCHMARKS


def test_infinitebench_questions_may_have_several_answers():
    items = load_items(load_task("infinitebench-qa"), BENCHMARKS)
    assert [item.id for item in items] == ["0", "1", "2"]
    assert len(items[0].answers) == 2
    assert items[0].query == items[0].messages[-1].content


def test_the_answers_of_a_choice_are_its_text_and_its_letter():
    for item in load_items(load_task("infinitebench-mc"), BENCHMARKS):
        text, letter = item.answers
        assert item.fields[f"option_{letter}"] == text


def test_a_summary_is_asked_without_a_question():
    item = load_items(load_task("infinitebench-sum"), BENCHMARKS)[0]
    assert item.query == item.messages[-1].content == "Summarize the book."


def test_an_answer_that_is_no_option_is_refused(tmp_path):
    file = tmp_path / "mc.jsonl"
    options = ["a", "b", "c", "d"]
    record = {"id": 7, "context": "x", "input": "q", "answer": ["e"], "options": options}
    file.write_text(json.dumps(record))
    with pytest.raises(ConfigurationError, match="item 7: the answer must be one of four options"):
        load_items(load_task("infinitebench-mc"), file)
