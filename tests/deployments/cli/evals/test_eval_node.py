"""Table 1 on a machine: its plan, its processes and, with tiny models, all of its way."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from deployments.cli.evals.eval_node import NodeShard, supervise
from deployments.cli.evals.eval_options import EvalOptions
from deployments.cli.evals.eval_plan import plans
from evaluation.drivers import item_runner
from evaluation.items import Item
from evaluation.loaders import load_items
from evaluation.reports.report import body
from evaluation.reports.run_results import RunResults
from tests.deployments.cli.eval_command import rapid_eval, words
from tests.evaluation.tiny_task import tiny_task
from tests.ray_cluster import wait_until

BOOKS = "infinitebench-llama-3.1-8b"
RECIPES = {"llama-3.1-8b": "plain", "llama-3.1-8b-self": "rapid-self-paper", BOOKS: "plain"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Official files of the two benchmarks, with generated documents."""
    sizes = {"source": {"loader": "generated", "split": "dev", "options": {"lengths": {300: 2}}}}
    items = load_items(tiny_task(**sizes))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.json").write_text(json.dumps([of_longbench(each) for each in items]))
    for kind in ("qa", "choice", "sum"):
        lines = [json.dumps(of_infinitebench(n, each, kind)) for n, each in enumerate(items)]
        (folder / f"longbook_{kind}_eng.jsonl").write_text("\n".join(lines))
    return folder


def of_longbench(item: Item) -> dict[str, str]:
    assert item.document is not None
    groups = {"domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short"}
    choices = dict.fromkeys(("choice_A", "choice_B", "choice_C"), "something else")
    choices["choice_D"] = item.answers[0]
    asked = {"question": item.messages[-1].text, "answer": "D", "context": item.document.text}
    return {"_id": item.id, **groups, **choices, **asked}


def of_infinitebench(number: int, item: Item, kind: str) -> dict[str, object]:
    assert item.document is not None
    options = ["a", "b", "c", item.answers[0]] if kind == "choice" else []
    asked = "" if kind == "sum" else item.messages[-1].text
    told = {"context": item.document.text, "input": asked, "answer": [item.answers[0]]}
    return {"id": number, "options": options, **told}


def test_two_parts_of_table_1_make_the_page_that_one_run_makes(data, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    out = tmp_path / "table"
    models = ("--target", "embedded:target", "--embedder", "lexical", "--batch", "4")
    named = [word for name in RECIPES for word in ("--recipe", name)]
    told = rapid_eval("--node", "2xcpu", *named, "--data", str(data), "--out", str(out), *models)
    assert told.exit_code == 0, [log.read_text()[-2000:] for log in out.rglob("*.log")]
    page = (out / "report.md").read_text()
    whole = EvalOptions(
        recipe=list(RECIPES), data=data, target="embedded:target", embedder="lexical",
        batch=4, workers=1, reuse_prefill=True, out_dir=tmp_path / "whole",
    )  # fmt: skip
    for plan, folder in plans(whole):
        items = load_items(plan.task, data)
        plan = replace(plan, items=items)
        item_runner.run(plan, folder, Console(file=io.StringIO()))
        alone = RunResults.read(folder)
        parts = RunResults.read(out / "llama-3.1-8b" / plan.task.name)
        assert answers(parts) == answers(alone)
        sections = [scores_of(body(each, {})) for each in (parts, alone)]
        assert sections[0] == sections[1]
        assert scores_of(page.split(f"## llama-3.1-8b: {plan.task.name}\n")[1]) != ""
    first = page.split("\n## ")[0]
    for name, system in RECIPES.items():
        assert f"| {name} | {system} |" in first
    assert f"| {BOOKS} | plain | average | 6 | 39.33% |" in first


def answers(run: RunResults) -> dict[tuple[str, str, str], tuple[str, dict[str, float]]]:
    return {each.key: (each.prediction, each.scores) for each in run.results}


def scores_of(text: str) -> str:
    """The lines of a page that depend on answers alone, not on times or on who made it."""
    tables = [line for line in text.split("## Speed")[0].splitlines() if line.startswith("|")]
    return "\n".join(tables)


def test_the_plan_of_a_node_says_what_each_job_needs_and_runs_nothing(tmp_path):
    plan = words(rapid_eval("--node", "8xH100", "--dry-run", "--out", str(tmp_path / "out")))
    assert "llama-3.1-8b 15 1 8 " in plan
    assert "llama-3.1-70b 9 4 2 " in plan
    assert "--recipe llama-3.1-8b-sd-cot" in plan
    assert "--shard 1/2 --out" in plan
    small = words(rapid_eval("--node", "2xh100", "--dry-run", "--out", str(tmp_path / "out")))
    assert "llama-3.1-70b is left out: it needs 4 GPUs" in small
    quantized = ("--node", "2xh100", "--dry-run", "--recipe", "llama-3.1-70b-int4")
    assert "llama-3.1-70b-int4 1 2 1 " in words(rapid_eval(*quantized))
    every = words(rapid_eval("--node", "2xh100", "--dry-run", "--quantization", "int4"))
    assert "--recipe llama-3.1-8b-by-70b-cot-int4" in every
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--node", "eight"), "such as 8xh100, or processes of a rehearsal, such as 2xcpu; kinds"),
        (("--node", "8xh1000"), "no GPU 'h1000' is known: did you mean h100"),
        (("--node", "8xh100", "--task", "laptop"), "or --node without --task"),
        (("--node", "8xh100", "--quantization", "int3"), "take one of fp8, int4"),
        (("--recipe", "llama-3.1-8b", "--quantization", "int4"), "--quantization goes with --node"),
        (
            ("--node", "8xh100", "--recipe", "llama-3.1-70b", "--quantization", "int4"),
            "name those that end in -int4",
        ),
        (("--recipe", "llama-3.1-8b", "--recipe", "qwen2.5-7b"), "have other models"),
        (("--recipe", "llama-3.1-8b", "--shard", "3/2"), "--shard 3/2: give the number of a part"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments, told):
    result = rapid_eval(*arguments, "--dry-run")
    assert result.exit_code == 2
    assert told in words(result)


def test_a_node_with_fewer_gpus_than_were_named_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    result = rapid_eval("--node", "8xh100", "--out", str(tmp_path / "out"))
    assert "this machine shows 1 GPUs, and the node has 8" in words(result)
    assert not (tmp_path / "out").exists()


def process(name: str, code: str, folder: Path, num_gpus: int = 1) -> NodeShard:
    command = (sys.executable, "-c", f"import os, sys, time; {code}")
    return NodeShard(name, num_gpus, command, folder / f"{name}.log")


async def test_a_part_that_fails_is_told_with_its_log_and_the_others_go_on(tmp_path, capfd):
    tells = "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    shards = [process("a", "sys.exit('no room')", tmp_path), process("b", tells, tmp_path)]
    shards += [process(name, tells, tmp_path) for name in "cd"]
    shards.append(process("e", tells, tmp_path, num_gpus=2))
    failed = await supervise(shards, ["5", "7"])
    assert [each.name for each in failed] == ["a"]
    assert "no room" in (tmp_path / "a.log").read_text()
    told = capfd.readouterr().err
    assert f"a failed with exit status 1; its log is {tmp_path / 'a.log'}" in told
    assert {(tmp_path / f"{name}.log").read_text().strip() for name in "bcd"} <= {"5", "7"}
    assert (tmp_path / "e.log").read_text().strip() == "5,7"


async def test_when_it_is_interrupted_every_process_ends(tmp_path):
    waits = "print(os.getpid(), flush=True); time.sleep(600)"
    shards = [process(name, waits, tmp_path) for name in "abc"]
    task = asyncio.create_task(supervise(shards, ["", ""]))
    logs = [shard.log for shard in shards[:2]]
    begun = lambda: all(log.exists() and log.read_text() for log in logs)  # noqa: E731
    await asyncio.to_thread(wait_until, begun, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(psutil.pid_exists(int(log.read_text())) for log in logs)
    assert not shards[2].log.exists()
