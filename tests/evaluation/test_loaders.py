from __future__ import annotations

import json

import pytest

from evaluation.loaders import load_items
from evaluation.tasks import load_task
from rapid.errors import ConfigurationError
from tests.evaluation.benchmark_files import BENCHMARKS


def test_only_the_first_items_are_read_under_a_limit():
    assert len(load_items(load_task("longbench-v2"), BENCHMARKS, limit=2)) == 2


def test_two_items_of_one_id_are_refused(tmp_path):
    record = json.loads((BENCHMARKS / "data.json").read_text())[0]
    file = tmp_path / "data.json"
    file.write_text(json.dumps([record, record]))
    with pytest.raises(ConfigurationError, match="two items have the id 'fixture00'"):
        load_items(load_task("longbench-v2"), file)
