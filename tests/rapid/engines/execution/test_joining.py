"""Waiting for blocks that are due: only where the sum of all times until tokens becomes less."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from rapid.engine_status import LeaseUsage
from rapid.engines.attention.batch import Feed
from rapid.engines.execution.joining import wait_s
from rapid.engines.execution.scheduling import Scheduler
from rapid.engines.kv.cache import PageTable
from rapid.engines.work.base import Work
from tests.rapid.engines.gate import opened
from tests.rapid.tiny_models import random_prompt, reference_greedy, tiny_engine


@pytest.mark.parametrize(
    ("num_ready", "due_s", "sequence_s", "expected_s"),
    [
        (1, [], 0.0, 0.0),  # alone
        (1, [0.4], 0.0, 0.4),  # both after 1.4, instead of after 1 and 2
        (1, [0.6], 0.0, 0.0),  # 2 * 1.6 is more than 1 + 2
        (3, [0.4], 0.0, 0.0),  # three would wait for one
        (3, [0.1], 0.0, 0.1),
        (1, [0.1, 0.2, 0.3], 0.0, 0.3),  # all three together
        (1, [0.1, 0.9], 0.0, 0.1),  # for the first of them
        (2, [0.4], 0.8, 0.0),  # a step of three takes longer for the two, too
        (1, [0.01], 1.0, 0.0),  # joining saves too little of the time
    ],
)
def test_a_step_waits_where_all_get_their_tokens_earlier(
    num_ready: int, due_s: list[float], sequence_s: float, expected_s: float
) -> None:
    assert wait_s(num_ready, due_s, 1.0, sequence_s) == expected_s


class Rows(Work):
    """A call whose row is never computed."""

    def __init__(self, lease: Any, kind: Any = "step") -> None:
        super().__init__(lease, (0,))
        self.kind = kind

    @override
    def feeds(self, limit: int) -> list[Feed]:
        return [Feed([0], 0, PageTable((), 16), 0 if self.kind == "prefill" else 1)]

    @override
    def take(self, logits: torch.Tensor) -> None:
        raise NotImplementedError


class FakeLease:
    def __init__(self) -> None:
        terms = SimpleNamespace(tenant="local", weight=1)
        self.request = SimpleNamespace(terms=terms, traceparent="")
        self.used, self.is_over = LeaseUsage(), False


class Machine:
    """An engine whose steps take a second, with two leases that return two seconds later."""

    def __init__(self, num_rounds: int = 12, *, joins: bool = True) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(64, 4.0, lambda: self.now, joins=joins)
        self.first, self.second = leases = FakeLease(), FakeLease()
        for _ in range(num_rounds):
            for lease in leases:
                self.arrive(lease)
            assert self.step() == 2
            self.now += 2.0
        self.now -= 2.0

    def arrive(self, lease: Any, kind: Any = "step") -> None:
        self.scheduler.add(Rows(lease, kind))

    def step(self) -> int:
        """Compute all that is selected, and return how many calls that were."""
        scheduled = self.scheduler.select()
        if scheduled:
            self.now += 1.0
            self.scheduler.observe(1.0, scheduled)
        for work, _ in scheduled:
            work.finish(None)
            self.scheduler.drop(work)
        return len(scheduled)


def test_a_step_waits_for_a_block_that_is_due_and_takes_it_along() -> None:
    machine = Machine()
    machine.now += 1.9
    machine.arrive(machine.first)
    assert machine.step() == 0
    assert machine.scheduler.rest_s == pytest.approx(0.3)  # a tenth of two seconds late at most
    machine.now += 0.1
    machine.arrive(machine.second)
    assert machine.step() == 2


def test_a_step_waits_no_longer_than_until_the_block_was_due() -> None:
    machine = Machine()
    machine.now += 1.9
    machine.arrive(machine.first)
    assert machine.step() == 0
    machine.now += machine.scheduler.rest_s + 1e-6
    assert machine.step() == 1


def test_nothing_waits_where_no_other_is_due_soon() -> None:
    machine = Machine()
    machine.now += 1.0  # half a step before the other
    machine.arrive(machine.first)
    assert machine.step() == 1


def test_nothing_waits_for_a_lease_that_ended() -> None:
    machine = Machine()
    machine.now += 1.9
    machine.scheduler.forget(machine.second)  # type: ignore[arg-type]
    machine.arrive(machine.first)
    assert machine.step() == 1


@pytest.mark.parametrize("kind", ["prefill", "draft", "ahead"])
def test_nothing_waits_while_there_is_other_work(kind: str) -> None:
    machine = Machine()
    machine.now += 1.9
    machine.arrive(FakeLease(), kind)
    machine.arrive(machine.first)
    assert machine.step() > 0


def test_nothing_waits_before_steps_are_measured() -> None:
    machine = Machine(num_rounds=4)
    machine.now += 1.9
    machine.arrive(machine.first)
    assert machine.step() == 1


def test_nothing_waits_on_an_engine_that_does_not_join() -> None:
    machine = Machine(joins=False)
    machine.now += 1.9
    machine.arrive(machine.first)
    assert machine.step() == 1


async def test_loops_that_join_end_with_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four loops decode token by token, some after a moment; two end before the others."""

    def joining(*args: Any, **_: Any) -> Scheduler:
        return Scheduler(*args, joins=True)

    monkeypatch.setattr("rapid.engines.engine.Scheduler", joining)
    engine = tiny_engine()
    prompts = [random_prompt(20, seed) for seed in range(4)]

    async def loop(index: int) -> list[int]:
        lease_id = await opened(engine, f"{index}", prompt=prompts[index])
        found: list[int] = []
        for _ in range(6 + 6 * (index % 2)):
            verdict = await engine.decode(lease_id, 0, 1)
            found += verdict.token_ids
            if verdict.is_finished:
                break
            await asyncio.sleep(0.002 * index)
        engine.release(lease_id)
        return found

    try:
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*map(loop, range(4)))
    finally:
        engine.close()
    for prompt, found in zip(prompts, answers, strict=True):
        assert found == reference_greedy(prompt.tolist(), len(found))
