import json
from pathlib import Path

import pytest

from evaluation.loaders import load_items
from evaluation.tasks import load_task
from rapid.errors import ConfigurationError

BENCHMARKS = Path(__file__).parent / "benchmarks"


def task_with(name: str, **options: object):
    task = load_task(name)
    return task.model_copy(update={"source": task.source.model_copy(update={"options": options})})


def test_longbench_items_in_the_official_format():
    items = load_items(load_task("longbench-v2"), BENCHMARKS / "data.json")
    assert [item.id for item in items] == ["fixture00", "fixture01", "fixture02", "fixture03"]
    first = items[0]
    record = json.loads((BENCHMARKS / "data.json").read_text())[0]
    assert first.document is not None
    assert first.document.text == record["context"]
    assert first.answers == (record["answer"],)
    assert first.query == record["question"]  # without the choices
    assert first.messages[-1].content.startswith(f"{record['question']}\n(A) {record['choice_A']}")
    assert first.groups == {
        "difficulty": "easy",
        "length": "short",
        "domain": "Single-Document QA",
        "sub_domain": "Legal",
    }


def test_the_robustness_task_takes_the_long_items_alone():
    items = load_items(load_task("robustness"), BENCHMARKS)  # data.json of a directory
    assert [item.id for item in items] == ["fixture02", "fixture03"]


def test_only_the_first_items_are_read_under_a_limit():
    assert len(load_items(load_task("longbench-v2"), BENCHMARKS, limit=2)) == 2


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


def test_a_dialogue_ends_in_its_own_turns_under_others_as_history():
    task = task_with("dialogue", queries=2, padding=4, history_tokens=500)
    items = load_items(task, BENCHMARKS)
    lines = (BENCHMARKS / "mtbench101.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(items) == 2
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


def test_a_line_that_does_not_parse_is_named_and_the_rest_kept(tmp_path, caplog):
    lines = (BENCHMARKS / "longbook_qa_eng.jsonl").read_text().splitlines()
    file = tmp_path / "qa.jsonl"
    file.write_text("\n".join([lines[0], '{"id": 1, "con', "", "[1]", lines[2]]))
    items = load_items(load_task("infinitebench-qa"), file)
    assert [item.id for item in items] == ["0", "2"]
    assert [record.message.split(" is no ")[0] for record in caplog.records] == [
        f"{file} line 2",
        f"{file} line 4",
    ]


def test_a_missing_key_is_named_with_its_item(tmp_path):
    records = json.loads((BENCHMARKS / "data.json").read_text())
    del records[1]["choice_C"]
    file = tmp_path / "data.json"
    file.write_text(json.dumps(records))
    with pytest.raises(ConfigurationError, match="item fixture01 has no choice_C"):
        load_items(load_task("longbench-v2"), file)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is no JSON"),
        ("{}", "must be a JSON list of objects"),
        ("[]", "has no usable item"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_items_is_refused(tmp_path, text, complaint):
    file = tmp_path / "data.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=complaint):
        load_items(load_task("longbench-v2"), file)


def test_two_items_of_one_id_are_refused(tmp_path):
    record = json.loads((BENCHMARKS / "data.json").read_text())[0]
    file = tmp_path / "data.json"
    file.write_text(json.dumps([record, record]))
    with pytest.raises(ConfigurationError, match="two items have the id 'fixture00'"):
        load_items(load_task("longbench-v2"), file)


def test_without_data_the_one_file_of_the_hub_is_loaded(monkeypatch, tmp_path):
    """Its other splits have answers of another type, which `datasets` does not put up with."""
    (tmp_path / "longbook_qa_eng.jsonl").write_bytes(
        (BENCHMARKS / "longbook_qa_eng.jsonl").read_bytes()
    )
    (tmp_path / "math_calc.jsonl").write_text('{"id": 0, "answer": [1, 2]}\n')
    splits = "".join(
        f"  - split: {name}\n    path: {name}.jsonl\n" for name in ("math_calc", "longbook_qa_eng")
    )
    (tmp_path / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n"
    )
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    task = load_task("infinitebench-qa")
    source = task.source.model_copy(update={"hub": str(tmp_path)})
    from_hub = load_items(task.model_copy(update={"source": source}))
    assert from_hub == load_items(task, BENCHMARKS)
    whole = task.model_copy(update={"source": source.model_copy(update={"file": None})})
    with pytest.raises(ConfigurationError, match="give a local file with --data"):
        load_items(whole)


def test_a_hub_that_cannot_be_reached_points_to_a_file(monkeypatch):
    def load_dataset(*_: object, **__: object):
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(ConfigurationError, match=r"no network.*--data"):
        load_items(load_task("longbench-v2"))
    with pytest.raises(ConfigurationError, match="no dataset on the hub: give a file with --data"):
        load_items(load_task("dialogue"))


@pytest.mark.parametrize("name", ["longbench-v2", "dialogue"])
def test_an_option_that_the_loader_does_not_have_is_refused(name):
    with pytest.raises(ConfigurationError, match=r"source\.options"):
        load_items(task_with(name, lenght="long"), BENCHMARKS)
