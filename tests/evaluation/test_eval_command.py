"""``rapid eval`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from deployments.cli import app
from tests.evaluation.tiny_task import SETTINGS


def rapid_eval(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments])


def words(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | {"systems": ["plain", "rapid-boost"]}))
    return str(path)


def test_a_dry_run_shows_everything_and_leaves_nothing(task, tmp_path):
    out = tmp_path / "run"
    shown = rapid_eval("--task", task, "--dry-run", "--out", str(out), "--batch", "3")
    assert shown.exit_code == 0
    for part in (
        "tiny: two generated documents",
        "2, 4 answers",
        "rapid-boost: fused, drafts drafter, blocks of 10, eta 10, temperature 0",
        "embedded:target",
        "embedded:drafter",
        "retrieval.tokens 160",
        "batch 3",
        "user: Document ",
    ):
        assert part in words(shown)
    assert not out.exists()


def test_a_run_is_answered_reported_and_resumed(task, tmp_path):
    out = tmp_path / "run"
    command = ("--task", task, "--limit", "1", "--workers", "1", "--out", str(out))
    assert rapid_eval(*command).exit_code == 0
    lines = (out / "results.jsonl").read_text().splitlines()
    assert [json.loads(line).get("system") for line in lines] == [None, "plain", "rapid-boost"]
    assert "rapid-boost" in (out / "report.md").read_text()
    (out / "results.jsonl").write_text("\n".join(lines[:2]) + "\n")
    again = rapid_eval(*command)
    assert "| rapid-boost |" in again.output
    assert len((out / "results.jsonl").read_text().splitlines()) == 3
    other = rapid_eval(*command, "--batch", "2")
    assert other.exit_code == 1
    assert "settings.batch: 8 then, 2 now" in words(other)


def test_a_mode_is_a_system_of_its_own(task):
    shown = words(
        rapid_eval(
            "--task", task, "--dry-run", "--mode", "fused", "--eta", "3", "--transfer", "distill"
        )
    )
    assert "fused-eta-3.0-transfer-distill: fused, drafts drafter" in shown
    assert "eta 3, temperature 0" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give --task or --recipe"),
        (("--task", "nope"), "there is no task 'nope'"),
        (("--task", "TASK", "--system", "rapid-bost"), "did you mean rapid-boost?"),
        (("--task", "TASK", "--eta", "3"), "--eta goes with --mode"),
        (("--task", "TASK", "--mode", "fused", "--eta", "-1"), "--eta: "),
        (("--task", "TASK", "--mode", "plain", "--system", "sd"), "not both"),
        (("--task", "TASK", "--judge-model", "x"), "--judge-url and --judge-model go together"),
        (
            ("--task", "TASK", "--url", "http://127.0.0.1:9", "--system", "naive-sd"),
            "naive-sd: no server drafts in this way",
        ),
        (("--task", "TASK", "--target", "./nowhere"), "no such checkpoint directory"),
    ],
)
def test_a_mistake_is_one_sentence(task, arguments, told):
    result = rapid_eval(*(task if each == "TASK" else each for each in arguments))
    assert result.exit_code == 1
    assert told in words(result)
    assert "Traceback" not in result.output


def test_an_unknown_metric_is_refused_before_anything_is_loaded(tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | {"metrics": ["exakt"]}))
    result = rapid_eval("--task", str(path))
    assert result.exit_code == 1
    assert "metrics.0: unknown metric 'exakt'; known:" in words(result)


def test_the_list_has_tasks_recipes_and_systems():
    shown = rapid_eval("--list").output
    for name in ("longbench-v2", "llama-3.1-8b-self", "magicdec"):
        assert name in shown
