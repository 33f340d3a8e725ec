"""What an orchestrator's requests share, before and after a change of settings."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from deployments.config.serve_config import ServeConfig
from deployments.orchestrator.ray_pools import RayPool
from deployments.orchestrator.ray_services import RayServices
from rapid.checkpoints.text import ChatText
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import Overloaded, RetrievalUnavailable, TooManyRequests
from rapid.messages import LeaseRequest, Terms, as_prompt
from tests.deployments.orchestrator.full_pool import FullPool, settled
from tests.ray_cluster import FAKE_CONFIG, question


def config(max_queued: int = 20, **orchestrator: Any) -> ServeConfig:
    settings = copy.deepcopy(FAKE_CONFIG)
    settings["target"]["pool"] |= {"max_queued_requests": max_queued}
    settings["orchestrator"] |= orchestrator
    return ServeConfig.model_validate(settings)


def over(target: FullPool) -> RayServices:
    text = ChatText.load("embedded:target")
    return RayServices(target, FullPool(1), FullPool(1), text, text)  # type: ignore[arg-type]


def request(name: str) -> LeaseRequest:
    return LeaseRequest(name, Terms("a", SamplingConfig(), SpeculationConfig(), 8), as_prompt([1]))


async def hold(pool: Any, name: str, until: asyncio.Event) -> None:
    assert isinstance(pool, RayPool)
    async with pool.lease(request(name), timeout_s=60, beside=None):
        await until.wait()


async def crowd(pool: Any, number: int, until: asyncio.Event) -> list[asyncio.Task[None]]:
    """Requests that have come one after the other."""
    tasks = []
    for index in range(number):
        tasks.append(asyncio.create_task(hold(pool, f"c{index}", until)))
        await settled()
    return tasks


async def test_who_waits_before_a_change_is_before_those_who_come_after_it() -> None:
    target = FullPool(1)
    shared, done = over(target), asyncio.Event()
    before = shared.under(config()).pools.target
    early = await crowd(before, 8, done)
    after = shared.under(config(default_max_tokens=7)).pools.target
    late = asyncio.create_task(hold(after, "late", done))
    done.set()
    await asyncio.gather(*early, late)
    assert target.entered == [*(f"c{n}" for n in range(8)), "late"]


async def test_a_shorter_line_refuses_who_comes_and_keeps_who_waits() -> None:
    target = FullPool(1)
    shared, done = over(target), asyncio.Event()
    before = shared.under(config()).pools.target
    waiting = await crowd(before, 9, done)
    after = shared.under(config(max_queued=2)).pools.target
    with pytest.raises(TooManyRequests) as refused:
        await hold(after, "late", done)
    assert refused.value.retry_after_s is not None  # the pace of late is known here, too
    done.set()
    await asyncio.gather(*waiting)
    assert len(target.entered) == 9


async def test_what_was_measured_outlives_the_settings() -> None:
    shared = over(FullPool(1))
    before = shared.under(config(drafter_hangs_s=3))
    before.patience.observe(2.0)
    after = shared.under(config(drafter_hangs_s=40, target_hangs_s=5))
    assert after.costs is before.costs
    assert (after.patience.limit_s, after.patience.silent_s) == (40, 5)
    assert shared.under(config(drafter_hangs_s=3)).patience.limit_s == 20.0


async def test_prompts_of_old_and_new_settings_wait_for_the_same_threads() -> None:
    shared = over(FullPool(1))
    before, after = shared.under(config()).prompts, shared.under(config()).prompts
    assert before is not after
    before.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await after.target_prompt(question("late"), 100)


async def test_without_a_retriever_nothing_is_embedded() -> None:
    text = ChatText.load("embedded:target")
    shared = RayServices(FullPool(1), None, None, text, text)  # type: ignore[arg-type]
    shared.under(config())
    with pytest.raises(RetrievalUnavailable, match="Nothing is embedded here"):
        await shared.embed("acme", ["a"], None)


async def test_pools_that_are_one_have_one_line() -> None:
    target = FullPool(1)
    text = ChatText.load("embedded:target")
    settings = copy.deepcopy(FAKE_CONFIG) | {"drafter": "target"}
    settings["target"]["pool"] |= {"max_queued_requests": 1}
    shared = RayServices(target, target, FullPool(1), text, text)  # type: ignore[arg-type]
    pools = shared.under(ServeConfig.model_validate(settings)).pools
    done = asyncio.Event()
    waiting = await crowd(pools.target, 6, done)
    with pytest.raises(Overloaded):
        await hold(pools.alone, "rag", done)
    done.set()
    await asyncio.gather(*waiting)


async def test_nothing_is_read_ahead_while_requests_wait() -> None:
    shared, done = over(FullPool(1)), asyncio.Event()
    shared.check_idle()
    waiting = await crowd(shared.under(config()).pools.target, 8, done)
    with pytest.raises(Overloaded):
        shared.check_idle()
    done.set()
    await asyncio.gather(*waiting)
    shared.check_idle()
