"""The loop's ports over engines: a drafter that fails is lost, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rapid.engines.engine import Engine
from rapid.engines.local_ports import EngineDrafter, EngineVerifier, LocalLease, LocalPool
from rapid.errors import DrafterUnavailable, LeaseNotFound, OutOfStep
from tests.rapid.engines.gate import Gate
from tests.rapid.tiny_models import (
    engine_config,
    lease_request,
    loaded,
    random_prompt,
    reference_greedy,
    tiny_engine,
)

PROMPT = random_prompt(37, seed=1)
EXPECTED = reference_greedy(PROMPT.tolist(), 6)


@pytest.fixture
async def engines() -> AsyncIterator[tuple[Engine, Engine]]:
    """A target and a drafter that have read the prompt."""
    target, drafter = tiny_engine(), tiny_engine(seed=1)
    for engine in (target, drafter):
        await engine.open(lease_request("a", PROMPT))
        await engine.prefill("a")
    yield target, drafter
    for engine in (target, drafter):
        engine.close()
        engine.check_integrity()


async def test_a_forward_that_raises_in_the_drafter_loses_the_drafter_alone(
    engines: tuple[Engine, Engine],
) -> None:
    target, drafter = engines
    verifier, proposer = EngineVerifier(target, "a"), EngineDrafter(drafter, "a")

    def explode() -> None:
        raise RuntimeError("no memory")

    gate = Gate(drafter)
    gate.before = explode
    gate.open()
    with pytest.raises(DrafterUnavailable, match="no memory"):
        await verifier.verify(proposer.draft(None, 3))
    verdict = await verifier.decode(6)  # nothing was committed
    assert (verdict.position, verdict.token_ids) == (0, tuple(EXPECTED))


async def test_a_drafter_without_its_lease_is_lost(engines: tuple[Engine, Engine]) -> None:
    target, drafter = engines
    drafter.release("a")
    with pytest.raises(DrafterUnavailable, match="no lease 'a'"):
        await EngineVerifier(target, "a").verify(EngineDrafter(drafter, "a").draft(None, 3))


async def test_a_lease_tells_after_every_step_how_much_of_its_prompt_is_read() -> None:
    engine = tiny_engine(step_tokens=16)
    gate = Gate(engine)
    await engine.open(lease_request("a", PROMPT))
    lease = LocalLease(engine, "a")
    prefill = asyncio.create_task(lease.prefill())
    told = []
    for _ in range(3):
        await gate.forward_started()
        told.append(await lease.read_so_far())
        gate.let_one_through()
    await prefill
    assert told == [(0, 0), (16, 0), (32, 0)]
    assert await lease.read_so_far() == (len(PROMPT) - 1, 0)
    engine.release("a")
    with pytest.raises(LeaseNotFound):
        await lease.read_so_far()
    engine.close()


async def test_a_lease_held_in_this_process_lasts_until_its_holder_lets_it_go() -> None:
    now = [0.0]
    engine = Engine(loaded(), engine_config(lease_ttl_s=60.0), clock=lambda: now[0])
    request = lease_request("a", PROMPT)
    async with LocalPool(engine).lease(request, timeout_s=None, beside=None) as a:
        await a.prefill()
        now[0] = 10_000.0
        assert engine.status().leases_open == 1
        verdict = await a.verifier(0, lambda: None).decode(6)
        now[0] = 20_000.0
        assert engine.status().leases_open == 1
    assert verdict.token_ids == tuple(EXPECTED)
    assert engine.status().leases_open == 0
    engine.close()


async def test_a_block_is_judged_on_the_text_alone_that_it_continues(
    engines: tuple[Engine, Engine],
) -> None:
    """Two answers begin alike; a third lease holds another text of the same length."""
    target, drafter = engines
    asked = {"x": "one", "y": "two", "z": "one"}
    for engine in engines:
        for lease_id, answer_id in asked.items():
            committed = ((5 if lease_id == "z" else 6,),)
            request = lease_request(lease_id, PROMPT, answer_id=answer_id, committed=committed)
            await engine.open(request)
            await engine.prefill(lease_id)
    block = await drafter.draft("x", 0, None, 3)
    for lease_id in "yz":
        with pytest.raises(
            OutOfStep, match=f"of lease 'x' continues another .* lease '{lease_id}'"
        ):
            await target.verify(lease_id, 0, block)
    verdict = await target.verify("x", 0, block)
    again = await target.verify("x", 0, await drafter.draft("x", 0, verdict, 3))
    assert again.position == 1 + len(verdict.token_ids)
    for engine in engines:
        for lease_id in asked:
            engine.release(lease_id)


async def test_a_lease_that_replaces_another_takes_its_blocks(
    engines: tuple[Engine, Engine],
) -> None:
    target, drafter = engines
    verdict = await target.verify("a", 0, await drafter.draft("a", 0, None, 3))
    await target.open(lease_request("b", PROMPT, committed=(verdict.token_ids,)))
    await target.prefill("b")
    block = await drafter.draft("a", 0, verdict, 3)
    assert (await target.verify("b", 0, block)).position == len(verdict.token_ids)
    target.release("b")
