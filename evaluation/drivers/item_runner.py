"""Execution of a run, which can be resumed and shared by several processes."""

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
from evaluation.drivers.answering import Backend, Emit, Trial, answer_all, trials_left
from evaluation.drivers.in_process import Models, open_in_process
from evaluation.drivers.judge import JudgeConfig, judges
from evaluation.drivers.over_http import Server, open_over_http
from evaluation.items import Item
from evaluation.results import MADE, RESULTS, SHARD, Json, Log, Result, shard_name
from evaluation.scorers import Metric, scorers
from evaluation.tasks import Task
from rapid.checkpoints.facts import text_settings
from rapid.checkpoints.files import checkpoint_source, read_json
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError, RapidError
from rapid.planning.shapes import ModelShape
from rapid.transfers import run_rules

_SILENCE_S = 60.0  # between lines of progress where no bar can be drawn
_HASHED_BYTES = 2**26  # larger files of weights are identified by their size


@dataclass(frozen=True, slots=True)
class Plan:
    """The items, systems and conditions of a run, and how it is executed.

    Attributes:
        server: Server of a run over HTTP; `models` is then None.
        batch: Number of answers at once, in each worker.
        recipes: Names of the recipes that the run repeats, whose published numbers a report shows.
        rules: File that registers transfer rules, which every process of the run runs.
        shard: The part of the items to answer, and the number of parts; None answers all. Unrelated
            chunks are still taken from all items.
    """

    task: Task
    items: Sequence[Item]
    models: Models | None
    server: Server | None = None
    batch: int = 1
    workers: int = 1
    judge: JudgeConfig | None = None
    recipes: tuple[str, ...] = ()
    rules: Path | None = None
    shard: tuple[int, int] | None = None

    @property
    def mine(self) -> Sequence[Item]:
        """The items to answer: all, or those of the shard, with every system and condition."""
        if self.shard is None:
            return self.items
        part, count = self.shard
        # Neighbours stay together: they may be about one document, which is then read once.
        return self.items[(part - 1) * len(self.items) // count : part * len(self.items) // count]

    @property
    def num_answers(self) -> int:
        """Number of answers to give."""
        return len(self.mine) * len(self.task.systems) * len(self.task.conditions)

    def configuration(self) -> Json:
        """Return everything that the results depend on, with the time and the machine."""
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
            "systems": [each.model_dump(mode="json") for each in self.task.systems],
            "conditions": [each.model_dump(mode="json") for each in self.task.conditions],
            "models": models,
            "server": self.server.public() if self.server else None,
            "judge": self.judge.model_dump(mode="json") if self.judge else None,
            "settings": {"batch": self.batch, "workers": self.workers},
            "versions": {name: _version(name) for name in ("rapid-serve", "torch", "transformers")},
            MADE: circumstances(),
            **({} if self.rules is None else {"rules": _digest_file(self.rules)}),
            **({} if not self.recipes else {"recipes": list(self.recipes)}),
            **({} if self.shard is None else {SHARD: shard_name(self.shard)}),
        }


def run(plan: Plan, out: Path, console: Console) -> None:
    """Run or resume a plan and append the results to its file in the directory `out`.

    Raises:
        ConfigurationError: `out` holds another run, or the plan cannot be executed.
        KeyboardInterrupt: The run was interrupted. Its lines so far are kept, and the same call
            resumes it.
    """
    _metrics(plan)  # refuses a metric that cannot be had
    with Log(out / RESULTS, plan.configuration()) as log:
        trials = list(trials_left(plan.mine, plan.task, log.done))
        num_left = sum(1 + len(trial.same) for trial in chain.from_iterable(trials))
        if not num_left:
            return
        with _progress(console, plan.num_answers, plan.num_answers - num_left) as advance:

            def emit(result: Result) -> None:
                log.append(result)
                advance()

            workers = min(plan.workers, len(trials))
            if workers == 1:
                asyncio.run(_answer(plan, trials, emit))
            else:
                _share(plan, trials, workers, emit)


async def _answer(plan: Plan, trials: Sequence[Sequence[Trial]], emit: Emit) -> None:
    """Answer and score `trials` in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # the run's own progress bar says more
    backend: Backend
    if plan.server is not None:
        opened: Any = open_over_http(plan.task, plan.server)
    else:
        assert plan.models is not None
        mine = [of_item[0].item for of_item in trials]
        opened = open_in_process(plan.task, plan.models, plan.items, mine, batch=plan.batch)
    async with opened as backend:
        flat = chain.from_iterable(trials)
        await answer_all(backend, flat, plan.task, _metrics(plan), emit, batch=plan.batch)


def _metrics(plan: Plan) -> dict[str, Metric]:
    return scorers(plan.task.metrics, {} if plan.judge is None else judges(plan.judge))


@dataclass(slots=True)
class _Worker:
    """A process with its share of the items, and how many results each item still lacks."""

    process: Any
    left: Counter[str]
    is_done: bool = False


def _share(plan: Plan, trials: Sequence[Sequence[Trial]], count: int, emit: Emit) -> None:
    """Split the items over processes and emit their results in this one.

    The last message of a process is the error that stopped it, or None.
    """
    spawn = multiprocessing.get_context("spawn")
    inbox: multiprocessing.Queue[tuple[int, Result | RapidError | None]] = spawn.Queue()
    workers: list[_Worker] = []
    for index in range(count):
        # Neighbours stay together: they may be about one document, which is then read once.
        share = trials[index * len(trials) // count : (index + 1) * len(trials) // count]
        process = spawn.Process(target=_work, args=(plan, share, index, inbox), daemon=True)
        process.start()
        left = Counter[str]()
        for trial in chain.from_iterable(share):
            left[trial.item.id] += 1 + len(trial.same)
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
            elif message is not None:
                raise message
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


def _work(plan: Plan, trials: Sequence[Sequence[Trial]], index: int, outbox: Any) -> None:
    """Run a worker process with one compute thread.

    It ignores Ctrl-C, which is left to the parent, and ends when its parent ends.
    """
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    end: RapidError | None = None
    try:
        if plan.rules is not None:
            run_rules(plan.rules)
        asyncio.run(_answer(plan, trials, lambda result: outbox.put((index, result))))
    except RapidError as error:
        end = error
    outbox.put((index, end))


def _end_with_parent() -> None:
    """End this process once its parent has ended, because its results go nowhere then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _progress(console: Console, total: int, done: int) -> Iterator[Any]:
    """Show a bar with the time left, or a line a minute where no bar can be drawn."""
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
    """Describe a model for a configuration: its settings, its shape and a digest of its weights."""
    settings = read_json(checkpoint_source(config.model), "config.json")
    return config.model_dump(mode="json", exclude_defaults=True) | {
        "shape": _shape(settings) if settings else None,
        "weights": _weights(config),
    }


def _shape(settings: Json) -> Json:
    """Return the part of a model's shape that FLOPs depend on."""
    memory_only = {
        "tied_embeddings",
        "attention_biases",
        "output_biases",
        "mlp_biases",
        "query_key_norms",
        "layer_norms",
    }
    shape = ModelShape.of(text_settings(settings))
    return shape.model_dump(exclude=memory_only, exclude_defaults=True)


def _weights(config: EngineConfig) -> str | None:
    """Return a digest of a local checkpoint's weights, for large files of their names and sizes."""
    source = Path(checkpoint_source(config.model))
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else []
    if source.suffix == ".gguf":
        files = [source]
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        if size <= _HASHED_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _digest_file(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
