"""The benchmarks in their official formats, a few made-up items each."""

from __future__ import annotations

from pathlib import Path

from evaluation.tasks import Task, load_task

BENCHMARKS = Path(__file__).parent / "benchmarks"


def task_with(name: str, **options: object) -> Task:
    task = load_task(name)
    return task.model_copy(update={"source": task.source.model_copy(update={"options": options})})
