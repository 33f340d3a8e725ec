"""A run from its plan to its report: resumable, on one process or several."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from evaluation.circumstances import circumstances
from evaluation.drivers.answering import Backend, Emit, Work, answer_all, work_left
from evaluation.drivers.in_process import Models, open_in_process
from evaluation.drivers.judge import Judge, JudgeConfig
from evaluation.drivers.over_http import Server, open_over_http
from evaluation.items import Item
from evaluation.reports.metrics import scorers
from evaluation.results import MADE, Json, Log, Result
from evaluation.systems import System
from evaluation.tasks import Condition, Task
from rapid.checkpoints.files import checkpoint_source, read_json
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError, RapidError
from rapid.planning.shapes import ModelShape

RESULTS = "results.jsonl"

_SILENCE_S = 60.0  # between lines of progress where no bar can be drawn
_HASHED_BYTES = 2**26  # larger weights are known by their size


@dataclass(frozen=True, slots=True)
class Plan:
    """What is compared, on what, and how.

    Attributes:
        models: of a run in process.
        server: of a run over HTTP; `models` then is None.
        batch: answers at once, in each worker.
        workers: processes.
        judge: who scores where the task's metric is `judge`.
        recipe: name of the published row that this repeats; the report has its numbers beside ours.
    """

    task: Task
    items: Sequence[Item]
    models: Models | None
    server: Server | None = None
    batch: int = 1
    workers: int = 1
    judge: JudgeConfig | None = None
    recipe: str | None = None

    @property
    def systems(self) -> Sequence[System]:
        """What is compared."""
        return self.task.systems

    @property
    def conditions(self) -> Sequence[Condition]:
        """Under what."""
        return self.task.conditions

    @property
    def num_answers(self) -> int:
        """Lines that the whole run has."""
        return len(self.items) * len(self.systems) * len(self.conditions)

    def configuration(self) -> Json:
        """What the results depend on, and when and where they were made."""
        digest = hashlib.blake2b(digest_size=8)
        for item in self.items:
            digest.update(repr(item).encode("utf-8", "surrogatepass"))
        models: Json = {}
        if self.models is not None:
            models = {"target": _model(self.models.target)}
            if self.models.drafter is not None:
                models["drafter"] = _model(self.models.drafter)
        return {
            "task": self.task.model_dump(mode="json", exclude={"systems", "conditions"}),
            "items": {"number": len(self.items), "digest": digest.hexdigest()},
            "systems": [each.model_dump(mode="json") for each in self.systems],
            "conditions": [each.model_dump(mode="json") for each in self.conditions],
            "models": models,
            "server": self.server.public() if self.server else None,
            "recipe": self.recipe,
            "judge": self.judge.model_dump(mode="json") if self.judge else None,
            "settings": {"batch": self.batch, "workers": self.workers},
            "versions": {name: _version(name) for name in ("rapid-serve", "torch", "transformers")},
            MADE: circumstances(),
        }


def run(plan: Plan, out: Path, console: Console) -> None:
    """Answer what is left of a run; `out` then holds its lines.

    Raises:
        ConfigurationError: `out` holds another run, or the run cannot be.
        KeyboardInterrupt: the lines so far are kept, and the same call goes on from them.
    """
    scorers(plan.task.metrics, None if plan.judge is None else Judge(plan.judge))
    with Log(out / RESULTS, plan.configuration()) as log:
        works = list(work_left(plan.items, plan.systems, plan.conditions, log.done))
        num_left = sum(1 + len(work.same) for work in chain.from_iterable(works))
        if not num_left:
            return
        with _progress(console, plan.num_answers, plan.num_answers - num_left) as advance:

            def emit(result: Result) -> None:
                log.append(result)
                advance()

            workers = min(plan.workers, len(works))
            if workers == 1:
                asyncio.run(_answer(plan, works, emit))
            else:
                _share(plan, works, workers, emit)


async def _answer(plan: Plan, works: Sequence[Sequence[Work]], emit: Emit) -> None:
    """Answer in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # this run's own says more
    metrics = scorers(plan.task.metrics, None if plan.judge is None else Judge(plan.judge))
    backend: Backend
    if plan.server is not None:
        opened: Any = open_over_http(plan.task, plan.server)
    else:
        assert plan.models is not None
        mine = [of_item[0].item for of_item in works]
        opened = open_in_process(
            plan.task,
            plan.systems,
            plan.conditions,
            plan.models,
            plan.items,
            mine,
            batch=plan.batch,
        )
    async with opened as backend:
        flat = chain.from_iterable(works)
        await answer_all(backend, flat, plan.task, metrics, emit, batch=plan.batch)


@dataclass(slots=True)
class _Worker:
    """A process with its share of the items: how many results each still lacks."""

    process: Any
    left: Counter[str]
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class _Ended:
    """The last message of a worker; `error` is why it could not answer."""

    error: RapidError | None = None


def _share(plan: Plan, works: Sequence[Sequence[Work]], count: int, emit: Emit) -> None:
    """Split the items over processes; this one keeps the file."""
    spawn = multiprocessing.get_context("spawn")
    inbox: multiprocessing.Queue[tuple[int, Result | _Ended]] = spawn.Queue()
    workers: list[_Worker] = []
    for index in range(count):
        share = works[index::count]
        process = spawn.Process(target=_work, args=(plan, share, index, inbox), daemon=True)
        process.start()
        left = Counter[str]()
        for work in chain.from_iterable(share):
            left[work.item.id] += 1 + len(work.same)
        workers.append(_Worker(process, left))
    try:
        while not all(worker.is_done for worker in workers):
            try:
                index, message = inbox.get(timeout=1.0)
            except queue.Empty:
                for worker in workers:
                    _check_alive(worker)
                continue
            worker = workers[index]
            if isinstance(message, Result):
                worker.left[message.item] -= 1
                emit(message)
            elif message.error is not None:
                raise message.error
            else:
                worker.is_done = True
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()


def _check_alive(worker: _Worker) -> None:
    if not worker.is_done and worker.process.exitcode not in (None, 0):
        items = [item for item, lacks in worker.left.items() if lacks][:3]
        raise ConfigurationError(
            f"a worker ended with exit code {worker.process.exitcode} at one of the items "
            f"{', '.join(items)}: with too little memory, lower --batch or --workers"
        )


def _work(plan: Plan, works: Sequence[Sequence[Work]], index: int, outbox: Any) -> None:
    """A worker process: one compute thread; the parent alone hears Ctrl-C, and is not outlived."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        asyncio.run(_answer(plan, works, lambda result: outbox.put((index, result))))
    except RapidError as error:
        outbox.put((index, _Ended(error)))
    else:
        outbox.put((index, _Ended()))


def _end_with_parent() -> None:
    """A parent that was killed takes nobody's results any more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _progress(console: Console, total: int, done: int) -> Iterator[Any]:
    """A bar with the time left; where none can be drawn a line a minute."""
    columns = (BarColumn(), MofNCompleteColumn(), "answers", TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=done)
        began = said = time.monotonic()
        num_new = 0

        def advance() -> None:
            nonlocal said, num_new
            num_new += 1
            bar.advance(task)
            now = time.monotonic()
            if not console.is_terminal and now - said > _SILENCE_S:
                said = now
                left = (total - done - num_new) * (now - began) / num_new
                console.print(f"{done + num_new}/{total} answers, {left / 60:.0f} minutes left")

        yield advance


def _model(config: EngineConfig) -> Json:
    """A model as a configuration names it: what was set, its shape, and which weights they are."""
    settings = read_json(checkpoint_source(config.model), "config.json")
    return config.model_dump(mode="json", exclude_defaults=True) | {
        "shape": _shape(settings) if settings else None,
        "weights": _weights(config),
    }


def _shape(settings: Json) -> Json:
    """What FLOPs depend on."""
    memory_only = {
        "tied_embeddings",
        "attention_biases",
        "output_biases",
        "mlp_biases",
        "query_key_norms",
    }
    return ModelShape.of(settings).model_dump(exclude=memory_only)


def _weights(config: EngineConfig) -> str | None:
    """A digest of a local checkpoint's weights (of large ones, of their sizes)."""
    source = Path(checkpoint_source(config.model))
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        if size <= _HASHED_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
