from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray

from cluster.leases import HeldLease, hold, hold_beside
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import DrafterUnavailable, LeaseNotFound, Overloaded, PromptTooLong
from rapid.messages import LeaseRequest, Terms
from tests.ray_cluster import BEFORE_EXPIRY_S, Fakes, wait_until

pytestmark = pytest.mark.ray


def room(lease_id: str, num_tokens: int = 100) -> LeaseRequest:
    return LeaseRequest(
        lease_id,
        Terms("local", SamplingConfig(), SpeculationConfig(), 20),
        np.arange(num_tokens, dtype=np.int32),
    )


async def test_a_lease_hands_out_the_engine_and_is_released_with_the_block(fakes: Fakes) -> None:
    async with hold(fakes.target, room("a"), timeout_s=10, renew_every_s=0.5) as lease:
        status = await lease.engine.status.remote()
        assert (status.leases_open, status.kv_pages_in_use) == (1, 8)
        receipt = await lease.engine.prefill.remote(lease.lease_id)
        assert receipt.num_tokens == 100
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_a_lease_is_released_when_its_block_fails(fakes: Fakes) -> None:
    with pytest.raises(ZeroDivisionError):
        async with hold(fakes.target, room("b"), timeout_s=10, renew_every_s=0.5):
            raise ZeroDivisionError
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_what_the_engine_refuses_is_raised_here(fakes: Fakes) -> None:
    with pytest.raises(PromptTooLong, match="976 tokens too long"):
        async with hold(fakes.target, room("c", 1980), timeout_s=10, renew_every_s=0.5):
            pass
    assert fakes.held() == (0, 0)


async def test_a_prompt_that_is_too_long_for_a_grpc_message_reaches_the_engine(
    fakes: Fakes,
) -> None:
    with pytest.raises(PromptTooLong, match="1198996 tokens too long"):
        async with hold(fakes.target, room("long", 1_200_000), timeout_s=20, renew_every_s=0.5):
            pass
    assert fakes.held() == (0, 0)


async def test_who_waits_for_room_gives_up_in_time_and_leaves_nothing(fakes: Fakes) -> None:
    async def take(index: int) -> str:
        try:
            async with hold(
                fakes.target, room(f"d{index}", 1000), timeout_s=0.6, renew_every_s=0.5
            ):
                await asyncio.sleep(2)
                return "held"
        except Overloaded as error:
            return str(error)

    # 64 pages each, 512 in all: eight fit; more replicas may come, but not within 0.6 s.
    outcomes = await asyncio.gather(*(take(index) for index in range(12)))
    assert outcomes.count("held") >= 8
    assert "The Target pool is full: no room within 0.6 s." in outcomes
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)
    wait_until(lambda: fakes.is_settled("Target"), 60)  # the next tests hold leases on it


async def test_a_renewed_lease_outlives_its_time_to_live(fakes: Fakes) -> None:
    async with hold(fakes.target, room("e"), timeout_s=10, renew_every_s=0.5) as lease:
        await asyncio.sleep(8)
        await lease.engine.renew.remote(lease.lease_id)


async def test_a_silent_lease_expires(fakes: Fakes) -> None:
    async with hold(fakes.target, room("f"), timeout_s=10, renew_every_s=1000) as lease:
        await asyncio.to_thread(wait_until, lambda: fakes.held() == (0, 0), 20)
        with pytest.raises(LeaseNotFound):
            await lease.engine.renew.remote(lease.lease_id)


async def test_a_caller_that_is_killed_frees_its_lease_at_once(fakes: Fakes) -> None:
    @ray.remote(num_cpus=0)
    class Caller:
        async def take(self, pool: Any, request: LeaseRequest) -> None:
            self._held = hold(pool, request, timeout_s=10, renew_every_s=0.5)
            await self._held.__aenter__()

    caller = Caller.remote()
    await caller.take.remote(fakes.target, room("g"))
    assert fakes.held() == (1, 8)
    ray.kill(caller)
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


def beside(first: HeldLease, lease_id: str, timeout_s: float = 10) -> Any:
    """A second lease on the engine of `first`."""
    request = replace(room(lease_id), beside=first.lease_id)
    return hold_beside(
        first, request, timeout_s=timeout_s, renew_every_s=0.5, lost=DrafterUnavailable
    )


async def test_a_second_lease_is_on_the_engine_of_the_first(fakes: Fakes) -> None:
    async with hold(fakes.target, room("h"), timeout_s=10, renew_every_s=0.5) as first:
        async with beside(first, "h-draft") as second:
            assert second.engine._actor_id == first.engine._actor_id
            status = await second.engine.status.remote()
            assert (status.leases_open, status.kv_pages_in_use) == (2, 16)
        wait_until(lambda: fakes.held() == (1, 8), BEFORE_EXPIRY_S)
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_a_second_lease_that_finds_no_room_leaves_nothing(fakes: Fakes) -> None:
    async with (
        hold(fakes.target, room("i"), timeout_s=10, renew_every_s=0.5) as first,
        contextlib.AsyncExitStack() as held,
    ):
        for index in range(7):
            await held.enter_async_context(beside(first, f"i-{index}"))
        with pytest.raises(Overloaded, match=r"no room within 0\.3 s"):
            await held.enter_async_context(beside(first, "i-late", 0.3))
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_a_caller_that_is_killed_frees_its_second_lease_as_well(fakes: Fakes) -> None:
    @ray.remote(num_cpus=0)
    class Caller:
        async def take(self, pool: Any) -> None:
            self._held = contextlib.AsyncExitStack()
            first = await self._held.enter_async_context(
                hold(pool, room("j"), timeout_s=10, renew_every_s=0.5)
            )
            await self._held.enter_async_context(beside(first, "j-draft"))

    caller = Caller.remote()
    await caller.take.remote(fakes.target)
    assert fakes.held() == (2, 16)
    ray.kill(caller)
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)
