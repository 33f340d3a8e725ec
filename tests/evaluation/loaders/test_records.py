from __future__ import annotations

import json

import pytest

from evaluation.loaders import load_items
from evaluation.loaders.records import read_records
from evaluation.tasks import load_task
from rapid.errors import ConfigurationError
from tests.evaluation.benchmark_files import BENCHMARKS


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


def test_a_table_is_read_by_the_names_in_its_first_line(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text('id,said\n1,"Two\n""lines"", one cell"\n', encoding="utf-8-sig")
    source = load_task("dialogue").source
    assert list(read_records(source, file, ("id", "said"), id_key="id")) == [
        {"id": "1", "said": 'Two\n"lines", one cell'}
    ]


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
