"""A whole run in this process, on the embedded models."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from evaluation.drivers import item_runner
from evaluation.drivers.in_process import Models
from evaluation.drivers.item_runner import Plan
from evaluation.loaders import load_items
from evaluation.results import RESULTS, Result, read
from evaluation.tasks import Task
from rapid.config import EngineConfig

MODELS = Models(EngineConfig(model="embedded:target"), EngineConfig(model="embedded:drafter"))
ByKey = dict[tuple[str, str, str], Result]


def answered(task: Task, out: Path, *, models: Models = MODELS, workers: int = 1) -> ByKey:
    plan = Plan(task, load_items(task), models, batch=4, workers=workers)
    item_runner.run(plan, out, Console(file=io.StringIO()))
    results = {each.key: each for each in read(out / RESULTS)[1]}
    assert len(results) == plan.num_answers
    return results
