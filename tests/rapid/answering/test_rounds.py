"""The rounds of a request: the prefills before them, the drafter, and the lengths of drafts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Literal

import pytest

import rapid
from deployments.api.http.error_responses import http_error
from deployments.pools.engine_actor import load_engine
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, Mode, SamplingConfig, SpeculationConfig
from rapid.errors import DrafterUnavailable, EngineFailed, OutOfStep, Overloaded
from rapid.events import GenerationEvent, Reading, Started, TextDelta
from rapid.messages import PrefillReceipt, ReadSoFar
from rapid.speculation.pace.controller import Controller
from rapid.transfers import Transfer
from tests.answered import ATLAS, receipt, script, text, tokens
from tests.fakes import FakeEngine
from tests.local_pools import FOUND, LocalApplication
from tests.ray_cluster import question


class ReadsWhenAsked(FakeEngine):
    """It reads ten tokens whenever somebody asks how far it has come, until it has read thirty."""

    dies_at = 0

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.progress, self.has_read = 0, asyncio.Event()

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        await self.has_read.wait()
        return replace(await super().prefill(lease_id), num_cached_tokens=5)

    def read_so_far(self, lease_id: str) -> ReadSoFar:
        self._lease(lease_id)
        self.progress += 10
        if self.progress == self.dies_at:
            self.die()
        if self.progress == 30:
            self.has_read.set()
        return ReadSoFar(self.progress, 5)


@pytest.fixture
def asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapid.answering.rounds._READING_S", 0)


@pytest.mark.usefixtures("asks_at_once")
async def test_a_streamed_answer_says_how_far_its_document_is_read() -> None:
    app = LocalApplication(load=ReadsWhenAsked)
    app.drafter.load = lambda: FakeEngine(app.config.drafter_pool.engine)
    app.drafter.start()
    request = question("r", mode="plain", documents=ATLAS, seed=5, max_tokens=12, explain=True)
    events = await app.answered(replace(request, is_streamed=True))
    assert tokens(events) == script(5, 12)
    length = receipt(events).prompt_tokens
    assert [each for each in events if isinstance(each, Reading)] == [
        Reading(10, length, num_cached=5),
        Reading(20, length, num_cached=5),
        Reading(30, length, num_cached=5),
        Reading(length, length, num_cached=5),
    ]
    assert isinstance(events[0], Started)


@pytest.mark.usefixtures("asks_at_once")
async def test_an_engine_that_nobody_watches_is_not_asked_how_far_it_has_read() -> None:
    app = LocalApplication(load=ReadsWhenAsked)
    engine = app.target.engine.actor._engine
    engine.has_read.set()
    events = await app.answered(question("r", mode="plain", documents=ATLAS, seed=5, max_tokens=12))
    assert not any(isinstance(each, Reading) for each in events)
    assert engine.progress == 0


class CannotSay(ReadsWhenAsked):
    """It reads well, and fails whenever it is asked how far it has come."""

    def read_so_far(self, lease_id: str) -> ReadSoFar:
        super().read_so_far(lease_id)
        raise EngineFailed("a bug in counting")


@pytest.mark.usefixtures("asks_at_once")
async def test_an_engine_that_cannot_say_how_far_it_has_read_costs_no_answer() -> None:
    app = LocalApplication(load=CannotSay)
    request = question("r", mode="plain", documents=ATLAS, seed=5, max_tokens=12, explain=True)
    events = await app.answered(replace(request, is_streamed=True))
    assert app.target.engine.actor._engine.progress == 30
    length = receipt(events).prompt_tokens
    told = [each for each in events if isinstance(each, Reading)]
    assert told == [Reading(length, length, num_cached=5)]
    assert (tokens(events), receipt(events).failovers) == (script(5, 12), ())


@pytest.mark.usefixtures("asks_at_once")
async def test_reading_is_told_anew_of_the_engine_that_replaces_a_dead_one() -> None:
    app = LocalApplication(load=ReadsWhenAsked)
    dying = app.target.engine

    def die() -> None:
        app.target.start()
        dying.kill()

    dying.actor._engine.dies_at, dying.actor._engine.die = 20, die
    request = question("r", mode="plain", documents=ATLAS, seed=5, max_tokens=12, explain=True)
    events = await app.answered(replace(request, is_streamed=True))
    told = [each.num_read for each in events if isinstance(each, Reading)]
    assert told == [10, 10, 20, 30, receipt(events).prompt_tokens]
    assert receipt(events).failovers == ("target lost",)
    assert tokens(events) == script(5, 12)


class ReadsSlowly(ReadsWhenAsked):
    """It reads so for one role; the prompts of others are read at once."""

    role, most = "", 30

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        is_slow = f"/{self.role}-" in lease_id
        return await (super() if is_slow else super(ReadsWhenAsked, self)).prefill(lease_id)

    def read_so_far(self, lease_id: str) -> ReadSoFar:
        if f"/{self.role}-" not in lease_id:
            return FakeEngine.read_so_far(self, lease_id)
        if self.progress < self.most:
            return super().read_so_far(lease_id)
        return ReadSoFar(self.most)


def reading_slowly(role: str) -> tuple[LocalApplication, ReadsSlowly]:
    """An application that gives no drafter or witness longer than 20 ms without a sign."""
    app = LocalApplication(drafter_hangs_s=0.02)
    pool = app.drafter if role == "drafter" else app.target
    engine = ReadsSlowly(app.config.target.engine)
    engine.role = role
    pool.load = lambda: engine
    pool.start()
    return app, engine


@pytest.mark.parametrize("role", ["drafter", "witness"])
async def test_who_reads_slowly_but_steadily_does_not_hang(role: str) -> None:
    app, engine = reading_slowly(role)
    request = question(
        "r", mode="fused", documents=ATLAS, seed=5, max_tokens=20, explain=True,
        rapid={"transfer": "adaptive"},
    )  # fmt: skip
    events = await app.answered(request)
    assert engine.progress == 30
    assert (receipt(events).failovers, receipt(events).plain_from) == ((), (None,))
    assert receipt(events).choices[0].drafted == 20
    assert tokens(events) == script(5, 20)


@pytest.mark.parametrize("role", ["drafter", "witness"])
async def test_who_reads_no_further_does(role: str) -> None:
    app, engine = reading_slowly(role)
    engine.most = 20
    request = question("r", documents=ATLAS, seed=5, rapid={"transfer": "adaptive"})
    assert receipt(await app.answered(request)).failovers == ("drafter hung",)
    assert engine.progress == 20


class Hangs(FakeEngine):
    """From the third call of this method on it answers nobody, and lives."""

    method = "draft"
    calls = 0

    async def draft(self, *args):
        await self._hang("draft")
        return await super().draft(*args)

    async def prefill(self, lease_id: str):
        await self._hang("prefill")
        return await super().prefill(lease_id)

    async def _hang(self, method: str) -> None:
        self.calls += method == self.method
        if self.calls >= (3 if method == "draft" else 1):
            await asyncio.Event().wait()


@pytest.mark.parametrize("site", ["target", "orchestrator"])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize(("mode", "method"), [("lossless", "draft"), ("auto", "prefill")])
async def test_a_drafter_that_hangs_leaves_the_answer_to_the_target(
    mode: str, method: str, num_choices: int, site: str
) -> None:
    app = LocalApplication(drafter_hangs_s=0.1, acceptance_site=site)
    app.drafter.load = lambda: hanging
    hanging = Hangs(app.config.drafter_pool.engine)
    hanging.method = method
    app.drafter.start()
    request = question(
        "r", mode=mode, documents=ATLAS, seed=5, max_tokens=60, num_choices=num_choices,
        explain=True,
    )  # fmt: skip
    events = await app.answered(request)
    end = receipt(events)
    assert end.failovers == ("drafter hung",)
    assert all(where is not None and where < 60 for where in end.plain_from)
    assert bool(end.choices[0].drafted) == (method == "draft")
    for choice in range(num_choices):
        assert tokens(events, choice) == script(5, 60, choice)
    await asyncio.sleep(0.05)
    assert hanging.leases == {}
    assert app.target.engine.actor._engine.leases == {}


class BreaksAtOnce(FakeEngine):
    """It reads or drafts nothing: it fails, ends its lease, or hangs."""

    how = ""

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        if self.how == "hangs while reading":
            await asyncio.Event().wait()
        if self.how == "fails to read":
            raise EngineFailed("a forward pass raised")
        return await super().prefill(lease_id)

    async def draft(self, lease_id, *args):
        if self.how == "hangs while drafting":
            await asyncio.Event().wait()
        if self.how == "loses its lease":
            self.release(lease_id)
        return await super().draft(lease_id, *args)


EARLY = ["hangs while reading", "fails to read", "hangs while drafting", "loses its lease"]


def with_drafter(how: str, **settings: object) -> LocalApplication:
    """An application whose drafter breaks in that way before the first token."""
    app = LocalApplication(drafter_hangs_s=0.05, **settings)
    engine = BreaksAtOnce(app.config.drafter_pool.engine)
    engine.how = how
    app.drafter.load = lambda: engine
    app.drafter.start()
    return app


@pytest.mark.parametrize("how", EARLY)
@pytest.mark.parametrize("mode", ["fused", "paper"])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_what_must_be_fused_is_an_error_where_the_drafter_is_lost_before_the_first_token(
    mode: str, how: str, num_choices: int
) -> None:
    app = with_drafter(how)
    asked = question("r", mode=mode, documents=ATLAS, seed=5, num_choices=num_choices)
    with pytest.raises(
        DrafterUnavailable, match=f"before the first token, and mode '{mode}'"
    ) as no:
        await app.answered(asked)
    assert http_error(no.value).status == 503
    for pool in (app.target, app.drafter):
        engine = pool.engine.actor._engine
        for lease in list(engine.leases.values()):
            await lease.closed.wait()


@pytest.mark.parametrize("mode", ["auto", "lossless"])
@pytest.mark.parametrize("how", EARLY)
async def test_others_go_on_without_the_drafter_and_the_receipt_says_so(
    how: str, mode: Mode
) -> None:
    asked = question("r", mode=mode, documents=ATLAS, seed=5, max_tokens=12, explain=True)
    waits = replace(asked.speculation, coupling="maximal")  # without it lossless may rest first
    events = await with_drafter(how).answered(replace(asked, speculation=waits))
    end = receipt(events)
    assert (end.mode, end.contract, end.eta, end.is_fallback) == ("plain", "target", 0.0, True)
    assert end.reason == "the drafter was lost before the first token: the target went on alone"
    assert (end.plain_from, len(end.failovers)) == ((0,), 1)
    assert tokens(events) == script(5, 12)


async def test_a_drafter_that_cannot_be_had_again_before_the_first_token_is_an_error() -> None:
    """The target dies while it reads, and the drafter's pool with it."""
    app = LocalApplication()
    events = app.generate(question("r", mode="fused", documents=ATLAS, seed=5))
    assert isinstance(await anext(events), Started)
    app.drafter.fail = Overloaded("The queue of the Drafter pool is full.", 7.2)
    dead = app.target.engine
    app.target.start()
    dead.kill()
    with pytest.raises(Overloaded, match="No drafter could be had"):
        await anext(events)


class Breaks(FakeEngine):
    """Its third draft raises what it is told to."""

    failure: Exception
    calls = 0

    async def draft(self, *args):
        self.calls += 1
        if self.calls == 3:
            raise self.failure
        return await super().draft(*args)


@pytest.mark.parametrize("site", ["target", "orchestrator"])
@pytest.mark.parametrize("mode", ["lossless", "fused"])
async def test_a_drafter_whose_forward_fails_is_lost_and_one_out_of_step_is_a_bug(
    mode: str, site: str
) -> None:
    app = LocalApplication(acceptance_site=site)
    app.drafter.load = lambda: Breaks(app.config.drafter_pool.engine)
    request = question("r", mode=mode, documents=ATLAS, seed=5, max_tokens=60, explain=True)
    Breaks.failure = EngineFailed("a forward pass raised OutOfMemoryError: the lease is gone")
    app.drafter.start()
    events = await app.answered(request)
    (lost_at,) = receipt(events).plain_from
    assert lost_at is not None
    assert 0 < lost_at < 60
    assert receipt(events).failovers == ("drafter lost",)
    assert tokens(events) == script(5, 60)
    Breaks.failure = OutOfStep("a verdict for another position")
    app.drafter.start()
    with pytest.raises(OutOfStep, match="another position"):
        await app.answered(replace(request, request_id="again"))


class Dawdles(FakeEngine):
    """Every block takes it longer than a drafter may take."""

    async def verify(self, *args):
        await asyncio.sleep(0.15)
        return await super().verify(*args)


async def test_a_target_that_takes_long_is_not_a_drafter_that_hangs() -> None:
    app = LocalApplication(drafter_hangs_s=0.05)
    app.target.load = lambda: Dawdles(app.config.target.engine)
    app.target.start()
    end = receipt(await app.answered(question("r", mode="lossless", seed=5, max_tokens=30)))
    assert (end.failovers, end.plain_from) == ((), (None,))
    assert end.choices[0].drafted == 30


OTHER = replace(FOUND, id="d:1", text="The well of Ruki is dry, and its banner is blue. ")


@pytest.mark.parametrize(
    ("dies_after", "transfer"), [(None, "boost"), (4, "boost"), (None, "adaptive")]
)
async def test_retrieving_again_is_served_as_it_runs_in_process(
    dies_after: int | None, transfer: Transfer
) -> None:
    """After rejected drafts drafter and witness read what is found for the answer so far."""
    app = LocalApplication(load=load_engine)
    app.retriever.chunk_again = OTHER
    asked = question(
        "r",
        mode="fused",
        documents=ATLAS,
        seed=5,
        max_tokens=40,
        explain=True,
        rapid={"transfer": transfer},
    )
    once = receipt(await app.answered(asked))
    app.retriever.queries.clear()
    again = replace(asked, speculation=replace(asked.speculation, refresh=True))
    dead = app.target.engine
    events = await app.answered(again, target_dies_after=dies_after)
    dead.actor._engine.close()
    end, queries = receipt(events), app.retriever.queries
    for pool in (app.target, app.drafter):
        pool.engine.actor._engine.close()
    (choice,) = end.choices
    assert end.failovers == (() if dies_after is None else ("target lost",))
    assert choice.refreshes == len(queries) - 1 > 0
    assert all(query.startswith(f"{queries[0]} ") for query in queries[1:])

    assert once.explanation is not None
    assert end.explanation is not None
    first, later = once.explanation.drafter_prompt_ids, end.explanation.drafter_prompt_ids
    assert first != later
    in_process = rapid.generate(
        rapid.load("embedded:target"),
        rapid.load("embedded:drafter"),
        end.explanation.target_prompt_ids,
        first,
        max_tokens=40,
        sampling=SamplingConfig(seed=5),
        speculation=SpeculationConfig(transfer=transfer),
        refresh=lambda token_ids: later,
    )
    assert tokens(events) == in_process.token_ids
    assert choice.refreshes == in_process.statistics.refreshes


async def test_retrieving_again_without_a_find_leaves_the_drafter_what_it_has_read() -> None:
    app = LocalApplication(load=load_engine)
    asked = question("r", mode="fused", documents=ATLAS, seed=5, max_tokens=40, explain=True)
    once = await app.answered(asked)
    app.retriever.queries.clear()
    events: list[GenerationEvent] = []
    again = replace(asked, speculation=replace(asked.speculation, refresh=True))
    async for event in app.generate(again):
        events.append(event)
        app.retriever.finds_nothing = True
    for pool in (app.target, app.drafter):
        pool.engine.actor._engine.close()
    end = receipt(events)
    assert len(app.retriever.queries) > 1
    assert (end.choices[0].refreshes, end.failovers, end.plain_from) == (0, (), (None,))
    assert end.chunks == receipt(once).chunks
    assert tokens(events) == tokens(once)


async def test_a_retriever_that_is_lost_later_leaves_the_rest_to_the_target() -> None:
    app = LocalApplication(load=load_engine)
    request = question("r", mode="fused", documents=ATLAS, seed=5, max_tokens=40)
    request = replace(request, speculation=replace(request.speculation, refresh=True))
    events: list[GenerationEvent] = []
    async for event in app.generate(request):
        events.append(event)
        app.retriever.fail = ValueError("the store is away")
    for pool in (app.target, app.drafter):
        pool.engine.actor._engine.close()
    end = receipt(events)
    assert end.plain_from[0] is not None
    assert end.failovers == ("drafter lost",)


@pytest.mark.parametrize("mode", ["plain", "rag"])
async def test_the_first_text_of_a_stream_is_its_first_tokens(mode: str) -> None:
    app = LocalApplication()
    whole = question("r", mode=mode, documents=ATLAS, seed=5, max_tokens=60, num_choices=2)
    events = await app.answered(replace(whole, is_streamed=True))
    first = [next(e for e in events if isinstance(e, TextDelta) and e.choice == c) for c in (0, 1)]
    tokens = ChatText.load("embedded:target")
    assert [each.text for each in first] == [tokens.decode(script(5, 1, c)) for c in (0, 1)]
    at_once = await app.answered(whole)
    assert [text(events, choice) for choice in (0, 1)] == [text(at_once, c) for c in (0, 1)]
    assert [each.rounds for each in receipt(at_once).choices] == [6, 6]


async def test_measured_lengths_rest_where_drafting_is_slower_than_plain_decoding() -> None:
    """Every step of a fake takes 10 ms: a block takes two, plain decoding one for ten tokens."""
    app = LocalApplication(draft_length="measured")
    request = question("r", mode="lossless", seed=10_005, max_tokens=300, explain=True)
    for number in range(2):
        events = await app.answered(replace(request, request_id=f"r{number}"))
        assert tokens(events) == script(5, 300)
    end = receipt(events)
    assert (end.mode, end.contract, end.plain_from) == ("lossless", "target", (None,))
    (choice,) = end.choices
    assert choice.rounds > 30 - 5
    assert choice.drafted_rounds <= 3  # trials that plain rounds have paid for


async def test_measured_lengths_never_rest_where_the_contract_needs_the_drafter() -> None:
    app = LocalApplication(draft_length="measured")
    request = question(
        "r", mode="fused", documents=ATLAS, seed=2_005, max_tokens=100, explain=True,
        rapid={"max_draft": 6},
    )  # fmt: skip
    end = receipt(await app.answered(request))
    assert end.explanation is not None
    assert "target" not in end.explanation.origins[0]
    assert max(end.choices[0].histogram) <= 6
    assert end.choices[0].drafted_rounds == end.choices[0].rounds


@pytest.mark.parametrize("fields", [{"mode": "paper"}, {"rapid": {"coupling": "maximal"}}])
async def test_a_seeded_text_that_depends_on_the_blocks_has_blocks_of_one_length(fields) -> None:
    app = LocalApplication(draft_length="measured")
    request = question("r", documents=ATLAS, seed=2_005, max_tokens=50, **fields)
    assert set(receipt(await app.answered(request)).choices[0].histogram) == {10}


async def test_an_answer_whose_drafter_rests_has_not_lost_it_when_its_target_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Controller, "_rest_for_good_below", lambda *_: None)
    app = LocalApplication(draft_length="measured")
    request = question("r", mode="lossless", seed=2_005, max_tokens=100, explain=True)
    events = await app.answered(request, target_dies_after=6)
    assert tokens(events) == script(5, 100)
    assert receipt(events).plain_from == (None,)
    assert app.drafter.num_streams == 2
    assert receipt(events).choices[0].drafted_rounds < receipt(events).choices[0].rounds


@pytest.mark.parametrize("drafter", [None, "target"])
async def test_an_answer_that_rests_for_good_gives_the_drafters_lease_back(
    drafter: Literal["target"] | None,
) -> None:
    """A draft and its judgement take two steps, and plain decoding one for as many tokens."""
    app = LocalApplication(drafter=drafter, draft_length="measured")
    request = question(
        "r", mode="lossless", seed=20_005, max_tokens=200, num_choices=2, explain=True
    )
    events: list[GenerationEvent] = []
    held: list[int] = []
    async for event in app.generate(request):
        events.append(event)
        roles = [name.split("/")[1][:7] for name in app.drafter.engine.actor._engine.leases]
        held.append(roles.count("drafter"))
    assert held[0] == 1
    assert held[-1] == 0
    assert [tokens(events, choice) for choice in range(2)] == [script(5, 200, 0), script(5, 200, 1)]
    assert receipt(events).choices[0].drafted > 0
    assert (receipt(events).failovers, receipt(events).plain_from) == ((), (None, None))


async def test_the_first_token_of_a_lossless_answer_does_not_wait_for_the_drafter() -> None:
    app = LocalApplication(draft_length="measured")
    app.drafter.load = lambda: FakeEngine(app.config.drafter_pool.engine, prefill_s=1000)
    app.drafter.start()
    events = await app.answered(question("r", mode="lossless", seed=5, explain=True))
    assert tokens(events) == script(5, 24)
    assert receipt(events).failovers == ()


async def test_a_drafter_that_fails_to_read_while_the_answer_grows_is_lost() -> None:
    class CannotRead(FakeEngine):
        async def prefill(self, lease_id: str) -> PrefillReceipt:
            await asyncio.sleep(0.1)
            raise EngineFailed("The engine failed at a step; its log says why.")

    app = LocalApplication(draft_length="measured")
    app.drafter.load = lambda: CannotRead(app.config.drafter_pool.engine)
    app.drafter.start()
    request = question("r", mode="lossless", seed=20_005, max_tokens=200, explain=True)
    events = await app.answered(request)
    assert tokens(events) == script(5, 200)
    assert receipt(events).failovers == ("drafter lost",)
    (lost_at,) = receipt(events).plain_from
    assert lost_at is not None
    assert 0 < lost_at < 200
