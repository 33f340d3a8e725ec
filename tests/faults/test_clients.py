"""The clients of the fault run, against an ingress whose orchestrator is scripted."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from deployments.proxy.plain_errors import OpenAIErrors
from rapid.errors import DrafterUnavailable, EngineFailed, Overloaded
from rapid.events import Finished, TextDelta
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt
from tests.deployments.serving import served
from tests.faults.clients import NUM_QUESTIONS, Arrival, Clients, Outcome, body
from tests.faults.hostile import (
    HOSTILE_KEY,
    Hostility,
    half_open,
    hostile_bodies,
    new_documents,
    slow_bodies,
)

TEXT = "Hello, wörld!"
STREAMED, WHOLE = 0, 1


def ingress(orchestrator: ScriptedOrchestrator) -> Ingress:
    keys = (ApiKey(tenant="clients", sha256=hash_key("sk-1")),)
    return Ingress(orchestrator, ApiConfig(model="rapid-embedded", keys=keys))


async def asked(app: ASGIApp, *arrivals: Arrival) -> list[Outcome]:
    async with served(app) as url:
        return await Clients([url], "sk-1").run(arrivals)


class Fragile:
    """An application whose first connections come to a bad end after so many events."""

    def __init__(
        self, app: ASGIApp, num_bad: int, after: int, *, says: str = "", is_silent: bool = False
    ) -> None:
        self.app, self.num_bad, self.after, self.says = app, num_bad, after, says
        self.is_silent = is_silent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_bad -= 1
        if self.num_bad < 0:
            await self.app(scope, receive, send)
        elif self.says:
            await PlainTextResponse(self.says, 500)(scope, receive, send)
        elif not self.is_silent:
            num_events = 0

            async def cutting(message: Message) -> None:
                nonlocal num_events
                num_events += message.get("body", b"").count(b"data: ")
                if num_events > self.after or not self.after:
                    raise ConnectionAbortedError("The process died.")
                await send(message)

            await self.app(scope, receive, cutting)


async def test_every_question_is_asked_and_every_other_one_streamed() -> None:
    orchestrator = ScriptedOrchestrator()
    load = [Arrival(0.0, "standard", question) for question in range(NUM_QUESTIONS)]
    outcomes = await asked(ingress(orchestrator), *load)
    assert {(each.end, each.text, each.num_broken) for each in outcomes} == {("answered", TEXT, 0)}
    assert all(each.began < (each.first or 0.0) <= each.ended for each in outcomes)
    assert sorted(r.seed or 0 for r in orchestrator.requests) == list(range(NUM_QUESTIONS))
    assert sum(r.is_streamed for r in orchestrator.requests) == NUM_QUESTIONS // 2


@pytest.mark.parametrize(("question", "after"), [(STREAMED, 0), (STREAMED, 2), (WHOLE, 0)])
async def test_a_broken_connection_is_counted_and_gone_past(question: int, after: int) -> None:
    app = Fragile(ingress(ScriptedOrchestrator()), 1, after)
    (outcome,) = await asked(app, Arrival(0.0, "standard", question))
    assert (outcome.end, outcome.text, outcome.num_broken) == ("answered", TEXT, 1)


async def test_the_connections_of_a_server_that_is_down_are_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host is gone, and nothing says so but its silence."""
    monkeypatch.setattr("tests.faults.clients.HEALTH_S", 0.05)
    good, is_over = ingress(ScriptedOrchestrator()), asyncio.Event()

    async def alive(scope: Scope, receive: Receive, send: Send) -> None:
        is_check = scope["path"] == "/-/healthz"
        await (PlainTextResponse("success") if is_check else good)(scope, receive, send)

    async def gone(scope: Scope, receive: Receive, send: Send) -> None:
        await is_over.wait()

    async with served(gone) as first, served(alive) as second:
        clients = Clients([first, second], "sk-1")
        outcomes = await clients.run([Arrival(0.0, "standard", each) for each in (STREAMED, WHOLE)])
        is_over.set()
    assert [(each.end, each.num_broken) for each in outcomes] == [("answered", 1), ("answered", 0)]


async def test_a_server_that_is_drained_finishes_what_it_has_and_gets_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.faults.clients.HEALTH_S", 0.05)
    is_over = asyncio.Event()
    slow = ScriptedOrchestrator(
        STARTED, is_over, TextDelta(0, TEXT, finish_reason="stop"), Finished(receipt())
    )
    here, there = ingress(slow), ScriptedOrchestrator()
    elsewhere = ingress(there)

    def healthy(app: ASGIApp, status: int) -> ASGIApp:
        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            is_check = scope["path"] == "/-/healthz"
            await (PlainTextResponse("", status) if is_check else app)(scope, receive, send)

        return checked

    async with served(healthy(here, 503)) as first, served(healthy(elsewhere, 200)) as second:
        asyncio.get_running_loop().call_later(1.0, is_over.set)
        load = [Arrival(0.0, "standard", STREAMED), Arrival(0.6, "standard", STREAMED)]
        outcomes = await Clients([first, second], "sk-1").run(load)
    assert [(each.end, each.num_broken) for each in outcomes] == [("answered", 0)] * 2
    assert (len(slow.requests), len(there.requests)) == (1, 1)


async def test_a_proxys_own_words_are_no_error_of_ours() -> None:
    app = Fragile(ingress(ScriptedOrchestrator()), 1, 0, says="Internal Server Error")
    (outcome,) = await asked(app, Arrival(0.0, "standard", WHOLE))
    assert (outcome.end, outcome.num_malformed) == ("answered", 1)


async def test_an_ingress_that_was_lost_is_asked_again() -> None:
    """The proxy says so in OpenAI's form."""
    app = OpenAIErrors(Fragile(ingress(ScriptedOrchestrator()), 1, 0, is_silent=True))
    (outcome,) = await asked(app, Arrival(0.0, "standard", WHOLE))
    assert (outcome.end, outcome.num_malformed, outcome.num_broken) == ("answered", 0, 1)


@pytest.mark.parametrize("question", [STREAMED, WHOLE])
async def test_refusals_and_failures_are_told_apart(question: int) -> None:
    arrival = Arrival(0.0, "standard", question)
    (refused,) = await asked(ingress(ScriptedOrchestrator(Overloaded("Full."))), arrival)
    assert refused.end == "refused"
    lost = ScriptedOrchestrator(STARTED, DrafterUnavailable("Lost before the first token."))
    (refused,) = await asked(ingress(lost), arrival)
    assert refused.end == "refused"
    script = (STARTED, TextDelta(0, "Hel"), EngineFailed("secret"))
    (failed,) = await asked(ingress(ScriptedOrchestrator(*script)), arrival)
    assert failed.end == "failed"
    assert "engine_failed" in failed.why


async def test_who_leaves_is_not_waited_for() -> None:
    orchestrator = ScriptedOrchestrator(STARTED, asyncio.Event())
    (outcome,) = await asked(ingress(orchestrator), Arrival(0.0, "standard", STREAMED, 0.2))
    assert outcome.end == "left"


@pytest.mark.parametrize("hostility", [slow_bodies, half_open, new_documents])
async def test_connections_that_go_on_slowly_or_not_at_all_are_passed_by(
    hostility: Hostility, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.faults.hostile.NUM_SLOW", 50)
    monkeypatch.setattr("tests.faults.hostile.NUM_CLIENTS", 10)
    keys = [("clients", "sk-1"), ("hostile", HOSTILE_KEY)]
    config = ApiConfig(
        model="rapid-embedded",
        keys=tuple(ApiKey(tenant=name, sha256=hash_key(key)) for name, key in keys),
    )
    app, num_begun, is_hostile = Ingress(ScriptedOrchestrator(), config), 0, asyncio.Event()

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun >= 10:
            is_hostile.set()
        await app(scope, receive, send)

    async with served(counting) as url:
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begins.set_result(None)
        hostile = asyncio.ensure_future(hostility(url, begins))
        await asyncio.wait_for(is_hostile.wait(), 30)
        (outcome,) = await Clients([url], "sk-1").run([Arrival(0.0, "standard", STREAMED)])
        assert not hostile.done()
        hostile.cancel()
        await asyncio.gather(hostile, return_exceptions=True)
    assert (outcome.end, outcome.num_broken) == ("answered", 0)


def test_the_hostile_bodies_are_long_and_cheap_to_make() -> None:
    sizes = [len(each) for each in hostile_bodies()]
    assert len(sizes) == 8
    assert all(1_300_000 < size < 2_000_000 for size in sizes)
    assert body(3) == body(3) != body(4)
