"""The leases of a request: what is lost while they are taken, and what a refusal says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest

from deployments.api.errors import http_error
from rapid.config import EngineConfig
from rapid.errors import Overloaded, TargetUnavailable, TooManyRequests
from rapid.messages import (
    Document,
    Finished,
    GenerateRequest,
    GenerationEvent,
    LeaseRequest,
    PrefillReceipt,
    Receipt,
    Started,
)
from tests.fakes import FakeEngine, scripted_token
from tests.local_pools import LocalActor, LocalApplication
from tests.ray_cluster import question

ATLAS = (Document("atlas", "The lighthouse of Varo guards the northern strait.\n\n" * 8),)
TEXT = tuple(scripted_token(5, 0, position) for position in range(60))


class LosesItself(FakeEngine):
    """It is lost when a second lease is asked of it, beside that of a request."""

    lose: Callable[[LeaseRequest], None]

    async def open(self, request: LeaseRequest) -> None:
        if request.beside is not None:
            self.lose(request)
        await super().open(request)


def dies(actor: LocalActor, beside: LeaseRequest) -> None:
    actor.kill()


def fails(actor: LocalActor, beside: LeaseRequest) -> None:
    """As an engine that closes itself: its leases are gone, and it takes no others."""
    engine = actor.actor._engine
    engine.leases.clear()
    engine.closed.set()


def hangs(actor: LocalActor, beside: LeaseRequest) -> None:
    actor.stop()


def ends_the_lease(actor: LocalActor, beside: LeaseRequest) -> None:
    """As after a step that failed: the engine lives, and the verifier's lease has ended."""
    assert beside.beside is not None
    actor.actor._engine.release(beside.beside)


def lose_target(app: LocalApplication, how: Callable[[LocalActor, LeaseRequest], None]) -> None:
    """Put a target in place that is lost at its next second lease, and replaced by a good one."""

    def load() -> FakeEngine:
        engine = LosesItself(app.config.target.engine)
        engine.lose = lambda request: (replaced(), how(actor, request))  # type: ignore[assignment]
        return engine

    def replaced() -> None:
        app.target.load = lambda: FakeEngine(app.config.target.engine)
        app.target.start()

    app.target.load = load
    app.target.start()
    actor = app.target.engine


def receipt(events: list[GenerationEvent]) -> Receipt:
    assert isinstance(events[-1], Finished)
    return events[-1].receipt


def tokens(end: Receipt) -> tuple[int, ...]:
    assert end.explanation is not None
    return end.explanation.token_ids[0]


def asked(mode: str, source: str) -> GenerateRequest:
    """A request whose source of drafts takes a second lease of the target."""
    transfer = "adaptive" if source == "witness" else "boost"
    return question(
        "r", mode=mode, documents=ATLAS, seed=2_005, max_tokens=60, explain=True,
        rapid={"transfer": transfer},
    )  # fmt: skip


def application(source: str, **settings: Any) -> LocalApplication:
    drafter: Literal["target"] | None = "target" if source == "companion" else None
    return LocalApplication(drafter=drafter, target_hangs_s=1.0, **settings)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.orchestrator.ray_ports._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("rapid.answering.leases._LOOK_EVERY_S", 0.05)


HOW = [(dies, "lost"), (fails, "lost"), (hangs, "hung"), (ends_the_lease, "lost")]


@pytest.mark.parametrize(("how", "failover"), HOW)
@pytest.mark.parametrize("source", ["witness", "companion"])
@pytest.mark.parametrize("mode", ["fused", "auto"])
async def test_a_target_that_is_lost_beside_its_own_lease_is_replaced(
    mode: str, source: str, how: Callable[[LocalActor, LeaseRequest], None], failover: str
) -> None:
    app = application(source)
    lose_target(app, how)
    events = await app.answered(asked(mode, source))
    end = receipt(events)
    assert isinstance(events[0], Started)
    assert (end.mode, end.contract, end.failovers) == ("fused", "fused", (f"target {failover}",))
    assert end.plain_from == (None,)
    assert tokens(end) == TEXT


@pytest.mark.parametrize(("how", "failover"), HOW)
@pytest.mark.parametrize("source", ["witness", "companion"])
async def test_so_is_one_that_is_lost_while_another_is_replaced(
    source: str, how: Callable[[LocalActor, LeaseRequest], None], failover: str
) -> None:
    app = application(source)
    events: list[GenerationEvent] = []
    async for event in app.generate(asked("fused", source)):
        events.append(event)
        if len(events) == 3:
            dead = app.target.engine
            lose_target(app, how)
            dead.kill()
    end = receipt(events)
    assert end.failovers == ("target lost", f"target {failover}")
    assert end.plain_from == (None,)
    assert tokens(end) == TEXT


@pytest.mark.parametrize("source", ["witness", "companion"])
async def test_a_target_that_is_lost_every_time_is_given_up_after_the_third(source: str) -> None:
    app = application(source)

    def load() -> FakeEngine:
        engine = LosesItself(app.config.target.engine)
        engine.lose = lambda _: next_one()  # type: ignore[assignment]
        return engine

    def next_one() -> None:
        dead = app.target.engine
        app.target.start()
        dead.kill()

    app.target.load = load
    app.target.start()
    with pytest.raises(TargetUnavailable):
        await app.answered(asked("fused", source))
    assert app.target.num_streams == 3


class NeverHasRoom(FakeEngine):
    """Its leases wait for ever; it tells when the first one does."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.waits = asyncio.Event()

    async def open(self, request: LeaseRequest) -> None:
        self.waits.set()
        await asyncio.Event().wait()


async def test_a_target_that_dies_while_its_drafter_has_no_room_is_replaced_at_once() -> None:
    app = LocalApplication(drafter_wait_s=1000)
    full = NeverHasRoom(app.config.drafter_pool.engine)
    app.drafter.load = lambda: full
    app.drafter.start()
    answering = asyncio.ensure_future(app.answered(asked("fused", "pool")))
    await full.waits.wait()
    app.drafter.load = lambda: FakeEngine(app.config.drafter_pool.engine)
    app.drafter.start()
    dead = app.target.engine
    app.target.start()
    dead.kill()
    async with asyncio.timeout(60):
        end = receipt(await answering)
    assert (end.contract, end.failovers) == ("fused", ("target lost",))
    assert tokens(end) == TEXT


class DiesWhileReading(FakeEngine):
    """It is lost when it reads the prompt of a second lease."""

    lose: Callable[[], None]

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        if self._lease(lease_id).request.beside is not None:
            self.lose()
        return await super().prefill(lease_id)


@pytest.mark.parametrize("source", ["witness", "companion"])
async def test_a_target_that_dies_while_it_reads_for_its_drafter_costs_no_drafter(
    source: str,
) -> None:
    app = application(source)
    engine = DiesWhileReading(app.config.target.engine)
    app.target.load = lambda: engine
    app.target.start()
    dead = app.target.engine

    def lose() -> None:
        app.target.load = lambda: FakeEngine(app.config.target.engine)
        app.target.start()
        dead.kill()

    engine.lose = lose
    end = receipt(await app.answered(asked("fused", source)))
    assert (end.failovers, end.plain_from) == (("target lost",), (None,))
    assert tokens(end) == TEXT


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("Too many requests wait already.", 7.2), 503),
        (TooManyRequests("Too many of your requests wait already.", 7.2), 429),
    ],
)
async def test_a_fused_request_that_finds_all_drafters_full_learns_when_to_try_again(
    error: Overloaded, status: int
) -> None:
    app = LocalApplication()
    app.drafter.fail = error
    with pytest.raises(type(error), match="No drafter could be had: Too many") as refused:
        await app.answered(asked("fused", "pool"))
    told = http_error(refused.value)
    assert (told.status, told.headers["retry-after"]) == (status, "8")
    events = await app.answered(asked("auto", "pool"))
    assert receipt(events).reason == "no drafter could be had: the target went on alone"


async def test_where_others_hold_drafters_that_is_measured_by_how_long_they_do() -> None:
    app = LocalApplication()
    lasting = app.generate(asked("fused", "pool"))
    assert isinstance(await anext(lasting), Started)
    app.drafter.fail = Overloaded("The queue of the Drafter pool is full.")
    with pytest.raises(Overloaded, match="No drafter could be had") as refused:
        await app.answered(asked("fused", "pool"))
    assert refused.value.retry_after_s is not None
    await lasting.aclose()
