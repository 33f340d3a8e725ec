"""The actor around an engine: calls arrive in any order, and a release is always the last word."""

from __future__ import annotations

import asyncio

import pytest

from deployments.pools.engine_actor import EngineActor, load_engine
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.errors import (
    ConfigurationError,
    DrafterUnavailable,
    EngineFailed,
    LeaseNotFound,
    OutOfStep,
)
from rapid.messages import LeaseRequest, Terms, Verdict, as_prompt
from tests.fakes import FakeEngine

ROOM = EngineConfig(model="none", max_context=64, kv_cache_tokens=64, max_leases=2)


def room(lease_id: str, num_tokens: int = 8, **fields: object) -> LeaseRequest:
    prompt = as_prompt(range(num_tokens))
    terms = Terms("local", SamplingConfig(), SpeculationConfig(), 8)
    return LeaseRequest(lease_id, terms, prompt, **fields)


@pytest.fixture
def actor() -> EngineActor:
    return EngineActor(ROOM, FakeEngine)


async def held(actor: EngineActor) -> int:
    return (await actor.status()).leases_open


async def test_a_release_that_overtakes_its_open_is_remembered(actor: EngineActor) -> None:
    await actor.release("a")
    with pytest.raises(LeaseNotFound, match="given up"):
        await actor.open(room("a"))
    assert await held(actor) == 0
    await actor.open(room("b"))
    assert await held(actor) == 1


async def test_its_metrics_are_as_fresh_as_its_replica_asks(actor: EngineActor) -> None:
    reported = []
    actor._metrics.report = reported.append  # type: ignore[method-assign]
    status = await actor.status()
    assert reported == [status]


async def test_an_engine_that_closed_by_itself_is_not_healthy_and_lives_no_longer(
    actor: EngineActor,
) -> None:
    await actor.ping()
    living = asyncio.create_task(actor.live())
    await asyncio.sleep(0.01)
    assert not living.done()
    actor._engine.closed.set()  # type: ignore[attr-defined]
    with pytest.raises(EngineFailed):
        await actor.ping()
    async with asyncio.timeout(5):
        await living


async def test_a_release_undoes_an_open_that_waits(actor: EngineActor) -> None:
    await actor.open(room("a", 56))
    waiting = asyncio.create_task(actor.open(room("b")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await actor.release("b")
    await asyncio.wait([waiting])
    await actor.release("a")
    assert await held(actor) == 0


async def test_what_was_opened_beside_a_lease_ends_with_it(actor: EngineActor) -> None:
    await actor.open(room("a"))
    await actor.open(room("a-draft", beside="a"))
    assert await held(actor) == 2
    await actor.release("a")
    assert await held(actor) == 0
    with pytest.raises(LeaseNotFound):
        await actor.open(room("a-again", beside="a"))


async def test_what_was_opened_beside_a_lease_ends_when_it_expires() -> None:
    """Its caller fell silent, and a second lease that is still renewed would be of no use."""
    actor = EngineActor(ROOM.model_copy(update={"lease_ttl_s": 0.01}), FakeEngine)
    await actor.open(room("a"))
    await actor.open(room("a-draft", beside="a"))
    await actor.wait_closed("a")
    assert await held(actor) == 0
    assert actor._companions == {}
    with pytest.raises(LeaseNotFound):
        await actor.open(room("a-again", beside="a"))
    assert actor._companions == {}


async def test_only_so_many_releases_are_remembered(
    actor: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.pools.engine_actor._RELEASES_REMEMBERED", 3)
    for number in range(10):
        await actor.release(str(number))
    assert list(actor._released) == ["7", "8", "9"]


async def test_a_draft_tells_a_lost_drafter_from_a_bug(
    actor: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await actor.open(room("a"))
    with pytest.raises(OutOfStep, match="a verdict for position 7"):
        await actor.draft("a", 0, Verdict("a", 0, 7, (5,), 1, 1, False), 2)
    await actor.release("a")
    with pytest.raises(DrafterUnavailable, match="no lease a"):
        await actor.draft("a", 0, None, 2)

    async def failed(*_: object) -> None:
        raise EngineFailed("a forward pass raised OutOfMemoryError: the lease is gone")

    monkeypatch.setattr(FakeEngine, "draft", failed)
    with pytest.raises(DrafterUnavailable, match="OutOfMemoryError"):
        await actor.draft("a", 0, None, 2)


async def test_a_closed_engine_that_verifies_as_well_is_more_than_a_lost_drafter(
    actor: EngineActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await actor.open(room("a"))
    await actor.open(room("a-draft", beside="a"))

    async def failed(*_: object) -> None:
        raise EngineFailed("The engine failed at a step; its log says why.")

    monkeypatch.setattr(FakeEngine, "draft", failed)
    with pytest.raises(DrafterUnavailable):
        await actor.draft("a-draft", 0, None, 2)
    actor._engine.closed.set()  # type: ignore[attr-defined]
    with pytest.raises(DrafterUnavailable):
        await actor.draft("a", 0, None, 2)  # the lease of a drafter
    with pytest.raises(EngineFailed):
        await actor.draft("a-draft", 0, None, 2)


def test_an_engine_counts_its_pool_before_it_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rapid.engines.forward.weights.loading.free_bytes", lambda device: 2**30)
    config = EngineConfig(model="embedded:target", device="cpu", kv_cache_tokens=2**20)
    with pytest.raises(ConfigurationError, match=r"KV pool 2.0 GiB.*lower kv_cache_tokens"):
        load_engine(config)
