"""Requests of several tenants before a pool that Serve would let them into as they come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.orchestrator.lease_queue import LeaseQueue
from deployments.orchestrator.ray_pools import RayPool
from deployments.orchestrator.ray_verifiers import VerifierSettings
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.engine_status import LeaseUsage
from rapid.errors import Overloaded, TargetUnavailable, TooManyRequests
from rapid.estimators import Patience
from rapid.messages import LeaseRequest, Terms, as_prompt
from tests.deployments.orchestrator.full_pool import FullPool, settled


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Callers:
    """Requests that hold their leases until they are told; the first letter is the tenant."""

    def __init__(self, pool: FullPool, max_waiting: int = 100, clock: Any = None) -> None:
        self.queue = LeaseQueue(max_waiting, **({"clock": clock} if clock else {}))
        verifiers = VerifierSettings(Patience(30), "target", frozenset())
        self.pool = RayPool(pool, self.queue, 60.0, verifiers, TargetUnavailable)  # type: ignore[arg-type]
        self.holding: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str, **settings: Any) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._hold(name, settings))
            await settled()

    async def end(self, name: str) -> None:
        self.holding.pop(name).set()
        await settled()

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _hold(self, name: str, settings: dict[str, Any]) -> None:
        timeout_s = settings.get("timeout_s", 60.0)
        request = LeaseRequest(
            name,
            Terms(name[0], SamplingConfig(), SpeculationConfig(), settings.get("max_tokens", 8)),
            as_prompt([1]),
            committed=settings.get("committed", ()),
        )
        async with self.pool.lease(request, timeout_s=timeout_s, beside=None):
            self.holding[name] = asyncio.Event()
            await self.holding[name].wait()


def names(tenant: str, number: int) -> list[str]:
    return [f"{tenant}{index}" for index in range(number)]


async def test_a_crowd_of_one_tenant_does_not_stand_before_another() -> None:
    """In Serve's own queue a guest would wait for all of the crowd."""
    pool = FullPool(2)
    callers = Callers(pool)
    await callers.ask(*names("crowd", 40), "guest")
    assert pool.entered == ["crowd0", "crowd1"]
    while "guest" not in pool.entered:
        await callers.end(next(iter(callers.holding)))
    # Before it came the two that held leases and the four that stood in Serve's queue.
    assert len(pool.entered) <= 2 + 4 + 2
    await callers.close()


async def test_who_has_used_less_of_the_engines_comes_first() -> None:
    pool = FullPool(1)
    callers = Callers(pool)
    await callers.ask(*names("a", 7), *names("b", 4))
    for tenant, busy_s in (("a", 5.0), ("b", 0.1)):
        terms = Terms(tenant, SamplingConfig(), SpeculationConfig(), 8)
        callers.queue.charge(LeaseRequest(tenant, terms, as_prompt([1])), LeaseUsage(busy_s))
    while callers.holding:
        await callers.end(next(iter(callers.holding)))
    assert pool.entered[5:] == ["b0", "b1", "b2", "b3", "a5", "a6"]
    await callers.close()


async def test_leases_that_wait_for_pages_do_not_keep_others_from_the_pool() -> None:
    """They have been taken by replicas; another one may be empty."""
    pool = FullPool(50)
    pool.has_pages.clear()
    callers = Callers(pool)
    await callers.ask(*names("large", 8), max_tokens=500)
    await callers.ask("l-small", "guest")
    assert set(callers.holding) == {"l-small", "guest"}
    await callers.close()


async def test_who_finds_the_queue_full_is_told_whose_requests_fill_it_and_when_to_come() -> None:
    clock = Clock()
    callers = Callers(FullPool(1), max_waiting=4, clock=clock)
    await callers.ask("a0")
    clock.now = 10.0
    await callers.end("a0")
    await callers.ask(*names("a", 8))  # one holds the lease, four are in Serve's queue, two wait
    with pytest.raises(TooManyRequests, match="Too many of your requests wait") as own:
        await callers.tasks["a7"]
    assert own.value.retry_after_s == 70.0  # the seventh lease from now, one every ten seconds
    await callers.ask("b0", "c0", "d0")
    with pytest.raises(Overloaded, match="Too many requests wait") as full:
        await callers.tasks["d0"]
    assert type(full.value) is Overloaded
    await callers.close()


async def test_an_answer_that_has_begun_is_not_refused_and_comes_first_of_its_tenant() -> None:
    pool = FullPool(1)
    callers = Callers(pool, max_waiting=2)
    await callers.ask(*names("a", 7))
    await callers.ask("again", committed=((5,),))
    while "again" not in pool.entered:
        await callers.end(next(iter(callers.holding)))
    assert pool.entered.index("again") == 5
    await callers.close()


async def test_who_waited_in_vain_is_told_when_to_come_back() -> None:
    clock = Clock()
    callers = Callers(FullPool(1), clock=clock)
    await callers.ask("a0")
    clock.now = 7.0
    await callers.ask("b0", timeout_s=0.05)
    with pytest.raises(Overloaded, match="The Target pool is full") as refused:
        await callers.tasks["b0"]
    assert refused.value.retry_after_s == 7.0
    await callers.end("a0")
    await callers.ask("c0")
    assert "c0" in callers.holding
    await callers.close()
