"""Runs that are resumed, shared by processes, and told apart by their configuration."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from evaluation.drivers import item_runner
from evaluation.drivers.item_runner import Plan
from evaluation.loaders import load_items
from evaluation.reports.run_results import SHARDS, RunResults
from evaluation.results import RESULTS, differences, read
from evaluation.systems import System
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.transfers import OWN_RULES, run_rules
from tests.evaluation.embedded_run import MODELS, answered
from tests.evaluation.tiny_task import SETTINGS, tiny_task
from tests.rapid import tiny_gguf

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_run_that_is_finished_is_not_run_again(tmp_path):
    task = tiny_task(systems=["plain"])
    before = answered(task, tmp_path)
    lines = (tmp_path / RESULTS).read_text()
    assert answered(task, tmp_path) == before
    assert (tmp_path / RESULTS).read_text() == lines


def test_workers_answer_what_one_process_answers(tmp_path):
    task = tiny_task(systems=["plain", "rapid-boost"])
    alone, shared = (answered(task, tmp_path / str(count), workers=count) for count in (1, 2))
    assert {key: each.prediction for key, each in shared.items()} == {
        key: each.prediction for key, each in alone.items()
    }


def test_the_parts_of_a_run_are_each_item_once_and_one_run_together(tmp_path):
    task = tiny_task(systems=["plain", "rapid-boost"])
    plan = Plan(task, load_items(task), MODELS, batch=4)
    whole = answered(task, tmp_path / "whole")
    for part in (1, 2):
        shard = replace(plan, shard=(part, 2))
        for _ in range(2):  # the second finds everything done
            item_runner.run(shard, tmp_path / f"{part}-of-2", Console(file=io.StringIO()))
        assert shard.num_answers == 2
    with pytest.raises(ConfigurationError, match='shard: "1-of-2" then, "2-of-2" now'):
        item_runner.run(shard, tmp_path / "1-of-2", Console(file=io.StringIO()))
    run = RunResults.read(tmp_path)
    assert run.configuration[SHARDS] == ["1-of-2", "2-of-2"]
    assert {each.key: each.prediction for each in run.results} == {
        key: each.prediction for key, each in whole.items()
    }


def test_any_number_of_parts_has_every_item_once_and_neighbours_together():
    items = load_items(tiny_task(source=SETTINGS["source"] | {"options": {"lengths": {200: 7}}}))
    for count in (1, 2, 3, 7, 9):
        plan = Plan(tiny_task(), items, MODELS)
        parts = [replace(plan, shard=(part, count)).mine for part in range(1, count + 1)]
        assert [item for part in parts for item in part] == items
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_process_of_a_run_runs_the_file_of_rules(tmp_path):
    rules = EXAMPLES / "own_transfer.py"
    run_rules(rules)
    try:
        system = System(name="mine", method="fused", transfer="geometric", eta=1)
        task = tiny_task(systems=["plain"]).model_copy(update={"systems": (system,)})
        plan = Plan(task, load_items(task), MODELS, workers=2, rules=rules)
        item_runner.run(plan, tmp_path, Console(file=io.StringIO()))
        known, results = read(tmp_path / RESULTS)
        assert all(each.accepted for each in results)
        assert len(known["rules"]) == 16
        assert "rules" not in replace(plan, rules=None).configuration()
    finally:
        OWN_RULES.clear()


def test_the_configuration_tells_runs_of_other_items_models_and_settings_apart():
    task = tiny_task()
    items = load_items(task)
    plan = Plan(task, items, MODELS)
    known = plan.configuration()
    assert known["models"]["target"]["weights"] != known["models"]["drafter"]["weights"]
    for other, key in (
        (replace(plan, items=items[:1]), "items.number"),
        (replace(plan, items=[items[0], replace(items[1], answers=("other",))]), "items.digest"),
        (replace(plan, models=replace(MODELS, target=MODELS.drafter)), "models.target.weights"),
        (replace(plan, batch=2), "settings.batch"),
    ):
        changes = [told.split(":")[0] for told in differences(known, other.configuration())]
        assert key in changes
    assert differences(known, plan.configuration()) == []


def test_gguf_files_of_other_weights_are_told_apart(tmp_path: Path) -> None:
    whole = tiny_gguf.write(tmp_path / "whole.gguf")
    tied = tiny_gguf.write(tmp_path / "tied.gguf", without="output.weight")
    described = [item_runner._model(EngineConfig(model=str(path))) for path in (whole, tied)]
    assert described[0]["weights"]
    assert described[0]["weights"] != described[1]["weights"]
    assert described[0]["shape"]["layers"] == tiny_gguf.LAYERS
