"""``rapid eval`` from its options to its report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest
import yaml

from deployments.cli.evals import evaluating
from evaluation.results import read
from tests.deployments.cli.eval_command import rapid_eval, words
from tests.evaluation.tiny_task import SETTINGS
from tests.ray_cluster import wait_until


def test_a_run_is_answered_reported_and_resumed(task, tmp_path):
    out = tmp_path / "run"
    command = ("--task", task, "--limit", "1", "--workers", "1", "--out", str(out))
    assert rapid_eval(*command).exit_code == 0
    lines = (out / "results.jsonl").read_text().splitlines()
    head, *systems = [json.loads(line).get("system") for line in lines]
    assert (head, sorted(systems)) == (None, ["plain", "rapid-boost"])  # as they end
    assert "rapid-boost" in (out / "report.md").read_text()
    (out / "results.jsonl").write_text("\n".join(lines[:2]) + "\n")
    again = rapid_eval(*command)
    assert "| rapid-boost |" in again.output
    assert len((out / "results.jsonl").read_text().splitlines()) == 3
    other = rapid_eval(*command, "--batch", "2")
    assert other.exit_code == 2
    assert "settings.batch: 8 then, 2 now" in words(other)


def test_two_kept_runs_are_compared(task, tmp_path):
    runs = [str(tmp_path / name) for name in "ab"]
    for run in runs:
        assert (
            rapid_eval("--task", task, "--limit", "1", "--workers", "1", "--out", run).exit_code
            == 0
        )
    told = rapid_eval("--compare", *runs)
    assert told.exit_code == 0
    assert f"{runs[1]} minus {runs[0]}" in told.output
    assert "| plain | 1 |" in told.output
    missing = rapid_eval("--compare", runs[0], str(tmp_path / "c"))
    assert (missing.exit_code, "cannot be read" in words(missing)) == (2, True)


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
        (
            ("--task", "TASK", "--url", "http://127.0.0.1:9", "--embedder", "lexical"),
            "--embedder and --url do not go together",
        ),
        (
            ("--task", "TASK", "--url", "http://127.0.0.1:9", "--dtype", "bfloat16"),
            "--dtype and --url do not go together",
        ),
        (("--task", "TASK", "--dtype", "int8"), "--dtype int8: Input should be 'auto', 'float32'"),
        (("--task", "TASK", "--mode", "plain", "--eta", "3"), "eta changes nothing"),
        (("--task", "TASK", "--target", "./nowhere"), "no such checkpoint directory"),
        (("--task", "TASK", "--out", "/dev/null/run"), "--out: /dev/null is no folder"),
        (
            ("--recipe", "infinitebench-llama-3.1-8b", "--data", "longbook_qa_eng.jsonl"),
            "has 3 tasks: give --data a folder",
        ),
    ],
)
def test_a_mistake_is_one_sentence(task, arguments, told):
    result = rapid_eval(*(task if each == "TASK" else each for each in arguments))
    assert result.exit_code == 2
    assert told in words(result)
    assert "Traceback" not in result.output


def test_an_unknown_metric_is_refused_before_anything_is_loaded(tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | {"metrics": ["exakt"]}))
    result = rapid_eval("--task", str(path))
    assert result.exit_code == 2
    assert "metrics.0: unknown metric 'exakt'; known:" in words(result)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_run_leaves_its_answers_and_no_worker(tmp_path, number):
    path, results = tmp_path / "long.yaml", tmp_path / "run" / "results.jsonl"
    long = {"source": SETTINGS["source"] | {"options": {"lengths": {300: 400}}}}
    path.write_text(yaml.safe_dump(SETTINGS | long))
    # A run in the background ignores Ctrl-C, and so would this process if these tests are one.
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = listens + "from deployments.cli import app; app()"
    command = [sys.executable, "-c", code, "eval", "--task", str(path)]
    command += ["--workers", "2", "--out", str(results.parent)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: results.exists() and results.read_text().count("\n") > 2, 180)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
        _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert len(read(results)[1]) >= 2
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on from there" in " ".join(told.split())
        assert "Traceback" not in told


def test_a_missing_extra_is_told_before_anything_is_answered(task, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating, "find_spec", lambda name: name != "matplotlib" or None)
    result = rapid_eval("--task", task, "--out", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert "matplotlib cannot be imported: pip install 'rapid-serve[eval]'" in words(result)
    assert not (tmp_path / "run").exists()
