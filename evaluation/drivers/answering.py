"""Trials and their execution: every (item, system, condition) once, several at a time."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evaluation.items import Item
from evaluation.results import Result
from evaluation.scorers import Metric
from evaluation.systems import System
from evaluation.tasks import Condition, Task
from rapid.errors import RapidError

logger = logging.getLogger(__name__)

Emit = Callable[[Result], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """One answer to produce: that of a system to an item under a condition.

    Attributes:
        same: Names of other conditions that change nothing for this system (another eta for plain
            decoding), for which the answer counts too.
    """

    item: Item
    system: System
    condition: Condition
    same: tuple[str, ...] = ()


class BackendLost(RapidError):
    """Nothing more can be answered: the run ends, and the same command goes on with it."""


class Backend(Protocol):
    """A source of answers: engines in this process, or a server."""

    async def answer(self, trial: Trial) -> Result:
        """Return the answer, not yet scored.

        Raises:
            BackendLost: It has none, and would have none for any other trial.
        """
        ...


def trials_left(
    items: Sequence[Item], task: Task, done: frozenset[tuple[str, str, str]] = frozenset()
) -> Iterator[list[Trial]]:
    """Yield the remaining trials of each item that has any.

    `done` has the keys (item, system, condition) that need no further answer.
    """
    for item in items:
        trials: list[Trial] = []
        for condition in task.conditions:
            for system in task.systems:
                if (item.id, system.name, condition.name) in done:
                    continue
                alike = _effect(system, condition)
                for index, other in enumerate(trials):
                    if other.system == system and _effect(system, other.condition) == alike:
                        same = (*other.same, condition.name)
                        trials[index] = Trial(item, system, other.condition, same)
                        break
                else:
                    trials.append(Trial(item, system, condition))
        if trials:
            yield trials


def _effect(system: System, condition: Condition) -> tuple[object, ...]:
    """Return the parts of a condition that can change an answer of `system`."""
    reading: tuple[object, ...] = ()
    if system.reads_retrieved:
        reading = (condition.corruption, condition.share, condition.retrieval_tokens)
    return condition.context_tokens, system.eta_in(condition.eta), *reading


async def answer_all(
    backend: Backend,
    trials: Iterable[Trial],
    task: Task,
    metrics: Mapping[str, Metric],
    emit: Emit,
    *,
    batch: int,
) -> None:
    """Answer and score `trials` in order, `batch` at a time; a failure is a result too.

    Raises:
        BackendLost: The backend has no more answers. What is in progress is given up.
    """

    async def answer(trial: Trial) -> None:
        result = result_of(trial, task)
        scores = dict.fromkeys(metrics, 0.0)
        try:
            result = await backend.answer(trial)
            for name, metric in metrics.items():  # a judge may take long
                scores[name] = await asyncio.to_thread(metric, result.prediction, trial.item)
        except BackendLost:
            raise
        except Exception as error:
            is_expected = isinstance(error, RapidError | ValueError)
            what = str(error) if is_expected else repr(error)
            named = f"item {trial.item.id}, {trial.system.name}, {trial.condition.name}"
            logger.error("%s: %s", named, what, exc_info=None if is_expected else error)
            result = result.model_copy(update={"error": what})
        for name in (trial.condition.name, *trial.same):
            emit(result.model_copy(update={"condition": name, "scores": scores}))

    waiting = iter(trials)

    async def one_after_another() -> None:
        for trial in waiting:
            await answer(trial)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(batch):
                group.create_task(one_after_another())
    except* BackendLost as lost:
        raise lost.exceptions[0] from None


def result_of(trial: Trial, task: Task, **measured: Any) -> Result:
    """Return a result with the fields that the trial determines and those that were measured."""
    return Result(
        item=trial.item.id,
        system=trial.system.name,
        condition=trial.condition.name,
        groups=dict(trial.item.groups),
        seed=seed_of(task, trial.item),
        **measured,
    )


def seed_of(task: Task, item: Item) -> int:
    """Return an item's seed, which is the same for every system."""
    digest = hashlib.blake2b(f"{task.seed} {item.id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def by_position(histogram: Mapping[int, Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Count how often the draft at each position of a block was judged, and how often it was kept.

    `histogram` has, for each block length, the number of rounds that accepted exactly i drafts.
    """
    longest = max(histogram, default=0)
    judged, kept = [0] * longest, [0] * longest
    for length, counts in histogram.items():
        for num_kept, rounds in enumerate(counts):
            for position in range(num_kept):
                judged[position] += rounds
                kept[position] += rounds
            if num_kept < length:
                judged[num_kept] += rounds
    return tuple(zip(judged, kept, strict=True))
