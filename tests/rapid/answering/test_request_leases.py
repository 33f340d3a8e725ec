"""The leases of a request: the room they take, what is lost meanwhile, and what a refusal says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest

from deployments.api.http.error_responses import http_error
from rapid.config import EngineConfig
from rapid.errors import (
    EngineFailed,
    Overloaded,
    TargetUnavailable,
    TooManyRequests,
)
from rapid.events import GenerationEvent, Started
from rapid.messages import GenerateRequest, LeaseRequest, PrefillReceipt
from tests.answered import ATLAS, receipt, script, tokens
from tests.fakes import FakeEngine
from tests.local_pools import LocalActor, LocalApplication, QueueingEngine
from tests.ray_cluster import question


async def test_a_crowd_on_an_engine_that_drafts_for_itself_keeps_its_drafts() -> None:
    """First leases never take the places or the pages that the drafts need."""
    for room in ({"max_leases": 4}, {"max_leases": 64, "kv_cache_tokens": 1024}):
        app = LocalApplication(drafter="target", engine=room, load=QueueingEngine, drafter_wait_s=2)
        crowd = [
            question(f"r{i}", mode=mode, documents=ATLAS, seed=2_005, max_tokens=24, explain=True)
            for i, mode in enumerate(("auto", "lossless", "fused", "plain") * 4)
        ]
        for request, events in zip(
            crowd, await asyncio.gather(*map(app.answered, crowd)), strict=True
        ):
            assert tokens(events) == script(5, 24)
            is_drafted = request.speculation.mode != "plain"
            assert bool(receipt(events).choices[0].drafted) == is_drafted, receipt(events).reason
        await asyncio.sleep(0.05)
        ledger = app.target.engine.actor._engine.ledger
        assert (ledger.status().leases_open, ledger.status().kv_pages_in_use) == (0, 0)


class RefusesToDraft(QueueingEngine):
    """Takes first leases and none beside them."""

    async def open(self, request: LeaseRequest) -> None:
        if request.beside is not None:
            raise EngineFailed("the engine takes no second lease")
        await super().open(request)


@pytest.mark.parametrize("why", ["nothing to retrieve from", "no retriever", "no drafter's lease"])
async def test_an_engine_keeps_no_room_for_a_drafter_that_will_not_come(why: str) -> None:
    """Of four places, four requests get one each; the last is one that never asked for two."""
    load = RefusesToDraft if why == "no drafter's lease" else QueueingEngine
    app = LocalApplication(drafter="target", engine={"max_leases": 4}, load=load)
    if why == "no retriever":
        app.retriever.fail = RuntimeError("away")
    documents = () if why == "nothing to retrieve from" else ATLAS
    crowd = [
        app.generate(question(f"r{i}", mode=mode, documents=documents, seed=5, max_tokens=24))
        for i, mode in enumerate(("auto", "auto", "auto", "plain"))
    ]
    async with asyncio.timeout(10):
        started = [await anext(events) for events in crowd]
    assert [each.mode for each in started] == ["plain"] * 4
    assert app.target.engine.actor._engine.ledger.status().leases_open == 4
    for events in crowd:
        await events.aclose()


async def test_an_answer_that_goes_on_without_drafter_keeps_no_room_for_one() -> None:
    """Its target died, and so it has a new lease: beside that there is room for somebody else."""
    app = LocalApplication(drafter="target", engine={"max_leases": 2}, load=QueueingEngine)
    lasting = app.generate(question("r1", seed=2_005, max_tokens=60))
    assert (await anext(lasting)).mode == "plain"
    await anext(lasting)
    dead = app.target.engine
    app.target.start()
    dead.kill()
    await anext(lasting)
    async with asyncio.timeout(10):
        await app.answered(question("r2", mode="plain", seed=5, max_tokens=24))
    events = [event async for event in lasting]
    assert receipt(events).failovers == ("target lost",)


async def test_an_answer_that_has_begun_waits_longer_for_a_target_than_a_new_request() -> None:
    """The only target died, and its replacement is ready long after new requests are refused."""
    app = LocalApplication(target_wait_s=0.3)
    begun = app.generate(question("r1", mode="plain", seed=5, max_tokens=60))
    await anext(begun)
    await anext(begun)
    app.target.engine.kill()
    rest = asyncio.ensure_future(_all(begun))
    with pytest.raises(TargetUnavailable):
        await app.answered(question("r2", mode="plain", seed=5, max_tokens=24))
    await asyncio.sleep(0.5)
    app.target.start()
    async with asyncio.timeout(10):
        assert receipt(await rest).failovers == ("target lost",)


async def _all(events: Any) -> list[GenerationEvent]:
    return [event async for event in events]


class CannotReadForDrafting(QueueingEngine):
    """Fails to read what a second lease is for."""

    async def prefill(self, lease_id: str):
        if "/drafter" in lease_id:
            raise EngineFailed("a forward pass raised")
        return await super().prefill(lease_id)


async def test_a_drafter_that_cannot_read_gives_its_room_back_while_the_answer_goes_on() -> None:
    app = LocalApplication(drafter="target", engine={"max_leases": 2}, load=CannotReadForDrafting)
    lasting = app.generate(question("r1", mode="lossless", seed=2_005, max_tokens=60))
    assert (await anext(lasting)).mode == "lossless"
    await anext(lasting)
    async with asyncio.timeout(10):
        await app.answered(question("r2", mode="plain", seed=5, max_tokens=24))
    events = [event async for event in lasting]
    assert receipt(events).plain_from == (0,)


async def test_after_its_drafter_was_lost_an_answer_asks_for_no_room_for_one() -> None:
    """The target's own engine drafts, fails at it, and is then lost as well."""
    opened: list[LeaseRequest] = []

    class Fails(FakeEngine):
        async def open(self, request: LeaseRequest) -> None:
            opened.append(request)
            await super().open(request)

        async def draft(self, *args: Any) -> Any:
            raise EngineFailed("out of memory")

    app = LocalApplication(drafter="target", load=Fails)
    request = question(
        "r", mode="auto", documents=ATLAS, seed=5, max_tokens=60, num_choices=2, explain=True
    )
    events = await app.answered(request, target_dies_after=3)
    assert receipt(events).failovers == ("drafter lost", "target lost")
    assert opened[0].companion_tokens > 0
    assert opened[-1].companion_tokens == 0
    assert [tokens(events, choice) for choice in range(2)] == [script(5, 60, 0), script(5, 60, 1)]


async def test_the_salt_of_a_request_reaches_all_of_its_leases() -> None:
    salts: list[str] = []

    class Recording(FakeEngine):
        async def open(self, request: LeaseRequest) -> None:
            salts.append(request.terms.cache_salt)
            await super().open(request)

    app = LocalApplication(load=Recording)
    await app.answered(question("r", mode="fused", documents=ATLAS, cache_salt="mine"))
    assert set(salts) == {"mine"}
    assert len(salts) > 1


# --- losses -----------------------------------------------------------------------------------

TEXT = script(5, 60)


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
    """Close it, as after a failure of its own: its leases are gone, and it takes no others."""
    engine = actor.actor._engine
    engine.leases.clear()
    engine.closed.set()


def hangs(actor: LocalActor, beside: LeaseRequest) -> None:
    actor.stop()


def ends_the_lease(actor: LocalActor, beside: LeaseRequest) -> None:
    """As after a step that failed: the engine lives, and the verifier's lease has ended."""
    assert beside.beside is not None
    actor.actor._engine.release(beside.beside)


def lose_target(
    app: LocalApplication,
    how: Callable[[LocalActor, LeaseRequest], None],
    engine_class: type[FakeEngine] = LosesItself,
) -> None:
    """Put a target in place that is lost over a second lease, and replaced by a good one."""

    def load() -> FakeEngine:
        engine: Any = engine_class(app.config.target.engine)
        engine.lose = lambda request: (replaced(), how(actor, request))
        return engine

    def replaced() -> None:
        app.target.load = lambda: FakeEngine(app.config.target.engine)
        app.target.start()

    app.target.load = load
    app.target.start()
    actor = app.target.engine


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


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.orchestrator.engine_calls._LOOK_EVERY_S", 0.05)
    monkeypatch.setattr("rapid.answering.request_leases._LOOK_EVERY_S", 0.05)


HOW = [(dies, "lost"), (fails, "lost"), (hangs, "hung"), (ends_the_lease, "lost")]


@pytest.mark.usefixtures("looks_often")
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
    assert tokens(events) == TEXT


@pytest.mark.usefixtures("looks_often")
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
    assert tokens(events) == TEXT


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


@pytest.mark.usefixtures("looks_often")
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
    async with asyncio.timeout(30):
        events = await answering
    end = receipt(events)
    assert (end.contract, end.failovers) == ("fused", ("target lost",))
    assert tokens(events) == TEXT


class LostWhileReading(FakeEngine):
    """It is lost when it reads the prompt of a second lease."""

    lose: Callable[[LeaseRequest], None]

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        request = self._lease(lease_id).request
        if request.beside is not None:
            self.lose(request)
        return await super().prefill(lease_id)


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(("how", "failover"), HOW[:3])
@pytest.mark.parametrize("source", ["witness", "companion"])
async def test_a_target_that_is_lost_while_it_reads_for_its_drafter_costs_no_drafter(
    source: str, how: Callable[[LocalActor, LeaseRequest], None], failover: str
) -> None:
    app = application(source)
    lose_target(app, how, LostWhileReading)
    events = await app.answered(asked("fused", source))
    end = receipt(events)
    assert (end.failovers, end.plain_from) == ((f"target {failover}",), (None,))
    assert tokens(events) == TEXT


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
