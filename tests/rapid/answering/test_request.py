"""The life of a request when things fail: real loop and leases over pools within this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import pytest
from grpc import StatusCode  # type: ignore[import-untyped]
from grpc.aio import AioRpcError, Metadata  # type: ignore[import-untyped]
from ray.serve.exceptions import DeploymentUnavailableError

import rapid
from deployments.pools.engine_actor import load_engine
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig, Transfer
from rapid.errors import (
    BadRequest,
    DrafterUnavailable,
    EngineFailed,
    OutOfStep,
    PromptTooLong,
)
from rapid.messages import (
    Document,
    Finished,
    GenerateRequest,
    GenerationEvent,
    LeaseRequest,
    PrefillReceipt,
    Reading,
    Receipt,
    Started,
    TextDelta,
    Verdict,
)
from rapid.speculation.controller import Controller
from tests.fakes import FakeEngine, FakeLease, scripted_token
from tests.local_pools import FOUND, LocalApplication, QueueingEngine
from tests.ray_cluster import question

ATLAS = (Document("atlas", "The lighthouse of Varo guards the northern strait.\n\n" * 8),)

BROKEN = [
    DeploymentUnavailableError("Drafter"),  # type: ignore[arg-type]
    RuntimeError("Unexpected error (StatusCode.CANCELLED): closing."),
    ValueError("a bug in the replica"),
    AioRpcError(StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata(), "full"),
]


def receipt(events: list[GenerationEvent]) -> Receipt:
    assert isinstance(events[-1], Finished)
    return events[-1].receipt


def tokens(events: list[GenerationEvent], choice: int = 0) -> tuple[int, ...]:
    explanation = receipt(events).explanation
    assert explanation is not None
    return explanation.token_ids[choice]


def script(seed: int, length: int, choice: int = 0) -> tuple[int, ...]:
    return tuple(scripted_token(seed, choice, position) for position in range(length))


def finished(events: Iterable[GenerationEvent]) -> list[int]:
    return [e.choice for e in events if isinstance(e, TextDelta) and e.finish_reason]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("mode", ["auto", "lossless"])
async def test_a_broken_drafter_pool_leaves_the_answer_to_the_target(
    broken: Exception, mode: str
) -> None:
    app = LocalApplication()
    app.drafter.fail = broken
    events = await app.answered(
        question("r", mode=mode, documents=ATLAS, seed=5, max_tokens=12, explain=True)
    )
    assert (receipt(events).mode, receipt(events).contract) == ("plain", "target")
    assert receipt(events).reason == "no drafter could be had: the target went on alone"
    assert tokens(events) == script(5, 12)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda error: type(error).__name__)
async def test_fused_cannot_do_without_one_and_says_so(broken: Exception) -> None:
    app = LocalApplication()
    app.drafter.fail = broken
    with pytest.raises(DrafterUnavailable, match="No drafter could be had"):
        await app.answered(question("r", mode="fused", documents=ATLAS))


@pytest.mark.parametrize("mode", ["auto", "lossless"])
async def test_a_broken_retriever_leaves_the_answer_to_the_target(mode: str) -> None:
    app = LocalApplication()
    app.retriever.fail = ValueError("http://me:secret@qdrant:6333 answered 500")
    end = receipt(await app.answered(question("r", mode=mode, documents=ATLAS)))
    assert (end.mode, end.contract) == ("plain", "target")
    assert end.reason.startswith("retrieval did not answer")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_rag_is_answered_by_the_drafter_alone_however_lengths_are_chosen(
    temperature: float,
) -> None:
    app = LocalApplication(draft_length="measured")
    request = question("r", mode="rag", documents=ATLAS, max_tokens=12, temperature=temperature)
    end = receipt(await app.answered(request))
    assert (end.mode, end.contract, end.choices[0].drafted) == ("rag", "drafter", 0)
    assert app.target.num_streams == 0


class DiesAtPrefill(FakeEngine):
    """Its process ends when it is first asked to read a prompt."""

    async def prefill(self, lease_id: str):
        self.end()
        return await super().prefill(lease_id)


async def test_rag_goes_on_elsewhere_when_its_engine_dies_while_reading() -> None:
    app = LocalApplication()
    app.drafter.load = lambda: DiesAtPrefill(app.config.drafter_pool.engine)
    app.drafter.start()

    def end() -> None:
        app.drafter.engine.kill()
        app.drafter.load = lambda: FakeEngine(app.config.drafter_pool.engine)
        app.drafter.start()

    DiesAtPrefill.end = staticmethod(end)
    events = await app.answered(
        question("r", mode="rag", documents=ATLAS, seed=5, max_tokens=12, explain=True)
    )
    assert receipt(events).contract == "drafter"
    assert tokens(events) == script(5, 12)


async def test_a_target_that_dies_costs_no_text_of_any_choice() -> None:
    app = LocalApplication()
    request = question("r", mode="plain", seed=2_005, max_tokens=60, num_choices=3, explain=True)
    events = await app.answered(request, target_dies_after=3)
    whole = await app.answered(replace(request, request_id="again"))
    assert (receipt(events).failovers, receipt(whole).failovers) == (("target lost",), ())
    assert sorted(finished(events)) == [0, 1, 2]
    for choice in range(3):
        assert tokens(events, choice) == script(5, 60, choice)
        assert text(events, choice) == text(whole, choice)


async def test_a_target_that_is_replaced_is_told_the_log_odds_of_the_text_so_far() -> None:
    opened: list[LeaseRequest] = []

    class Weighs(FakeEngine):
        """Its log odds are the number of tokens that it has committed."""

        async def open(self, request: LeaseRequest) -> None:
            opened.append(request)
            await super().open(request)

        async def verify(self, *args: Any) -> Verdict:
            verdict = await super().verify(*args)
            return replace(verdict, log_odds=float(verdict.position + len(verdict.token_ids)))

    app = LocalApplication(load=Weighs)
    request = question("r", mode="fused", documents=ATLAS, seed=2_005, max_tokens=60, num_choices=2)
    count = 0
    async for _ in app.generate(request):
        count += 1
        if count == 3:
            dead = app.target.engine
            app.target.start()
            dead.kill()
    told = [each for each in opened if each.committed and any(each.committed)]
    judged = [each.log_odds for each in told if each.log_odds]
    assert judged == [tuple(float(len(ids)) for ids in told[0].committed)]


class ReadsWhenAsked(FakeEngine):
    """It reads ten tokens whenever somebody asks how far it has come, until it has read thirty."""

    dies_at = 0

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.progress, self.has_read = 0, asyncio.Event()

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        await self.has_read.wait()
        return await super().prefill(lease_id)

    def num_read(self, lease_id: str) -> int:
        self._lease(lease_id)
        self.progress += 10
        if self.progress == self.dies_at:
            self.die()
        if self.progress == 30:
            self.has_read.set()
        return self.progress


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
        Reading(10, length),
        Reading(20, length),
        Reading(30, length),
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

    def num_read(self, lease_id: str) -> int:
        super().num_read(lease_id)
        raise EngineFailed("a bug in counting")


@pytest.mark.usefixtures("asks_at_once")
async def test_an_engine_that_cannot_say_how_far_it_has_read_costs_no_answer() -> None:
    app = LocalApplication(load=CannotSay)
    request = question("r", mode="plain", documents=ATLAS, seed=5, max_tokens=12, explain=True)
    events = await app.answered(replace(request, is_streamed=True))
    assert app.target.engine.actor._engine.progress == 30
    assert not any(isinstance(each, Reading) for each in events)
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
    assert [each.num_read for each in events if isinstance(each, Reading)] == [10, 10, 20, 30]
    assert receipt(events).failovers == ("target lost",)
    assert tokens(events) == script(5, 12)


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
@pytest.mark.parametrize(("mode", "method"), [("lossless", "draft"), ("fused", "prefill")])
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


def text(events: list[GenerationEvent], choice: int) -> str:
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return "".join(delta.text for delta in deltas if delta.choice == choice)


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


@pytest.mark.parametrize("site", ["target", "orchestrator"])
async def test_the_papers_rule_is_served_as_it_runs_in_process(site: str) -> None:
    app = LocalApplication(load=load_engine, acceptance_site=site)
    request = question(
        "r", mode="paper", documents=ATLAS, seed=5, max_tokens=40, explain=True, num_logprobs=0,
        rapid={"eta": 7.0},
    )  # fmt: skip
    events = await app.answered(request)
    for pool in (app.target, app.drafter):
        pool.engine.actor._engine.close()
    end = receipt(events)
    assert (end.mode, end.contract, end.eta) == ("paper", "paper", 7.0)
    assert (end.transfer, end.coupling, end.draft_top_k) == ("distill", "maximal", None)
    assert end.explanation is not None
    models = [rapid.load(f"embedded:{role}") for role in ("target", "drafter")]
    prompts = end.explanation.target_prompt_ids, end.explanation.drafter_prompt_ids
    in_process = rapid.generate(
        *models,
        *prompts,
        max_tokens=40,
        sampling=SamplingConfig(seed=5),
        speculation=SpeculationConfig(rule="paper", eta=7),
    )
    assert tokens(events) == in_process.token_ids
    assert end.explanation.origins == (tuple(in_process.statistics.origins),)
    (choice,) = end.choices
    assert choice.bonus > 0
    assert choice.completion_tokens == choice.accepted + choice.corrected + choice.bonus
    logprobs = [each for event in events if isinstance(event, TextDelta) for each in event.logprobs]
    assert len(logprobs) in (40, choice.completion_tokens - 1)  # an end of sequence has no text


def adaptive(request: GenerateRequest) -> GenerateRequest:
    return replace(request, speculation=replace(request.speculation, transfer="adaptive"))


class Remembers(FakeEngine):
    """Keeps every lease that was asked of it, and with which witness blocks were judged."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.opened: list[LeaseRequest] = []
        self.told: list[str | None] = []

    async def open(self, request: LeaseRequest) -> None:
        self.opened.append(request)
        await super().open(request)

    async def verify(self, lease_id, choice, block, witness=None) -> Verdict:
        self.told.append(witness and witness[1])
        return await super().verify(lease_id, choice, block, witness)


async def test_adaptive_lets_the_target_read_what_was_retrieved_beside_its_document() -> None:
    app = LocalApplication(load=Remembers)
    asked = question("r", mode="fused", documents=ATLAS, seed=5, max_tokens=12, explain=True)
    events = await app.answered(adaptive(asked))
    target = app.target.engine.actor._engine
    document, witness = target.opened
    assert (witness.beside, document.beside) == (document.lease_id, None)
    assert document.companion_tokens >= len(witness.prompt_ids)
    assert set(target.told) == {witness.lease_id}
    end = receipt(events)
    assert end.witness_tokens == len(witness.prompt_ids) > 0
    assert end.explanation is not None
    assert end.explanation.witness_prompt_ids == tuple(witness.prompt_ids.tolist())
    assert end.timings_ms["witness_prefill"] > 0
    assert tokens(events) == script(5, 12)


@pytest.mark.parametrize("settings", [{"transfer": "boost"}, {"transfer": "adaptive", "eta": 0}])
async def test_no_other_request_takes_a_witness(settings: dict[str, Any]) -> None:
    app = LocalApplication(load=Remembers)
    asked = question("r", mode="fused", documents=ATLAS, seed=5, max_tokens=12)
    asked = replace(asked, speculation=replace(asked.speculation, **settings))
    assert receipt(await app.answered(asked)).witness_tokens == 0
    assert len(app.target.engine.actor._engine.opened) == 1


async def test_a_target_that_drafts_for_itself_is_its_own_witness() -> None:
    app = LocalApplication(drafter="target", load=Remembers)
    asked = question("r", mode="fused", documents=ATLAS, seed=5, max_tokens=12)
    assert receipt(await app.answered(adaptive(asked))).witness_tokens == 0
    engine = app.target.engine.actor._engine
    assert len(engine.opened) == 2
    assert set(engine.told) == {None}


async def test_where_nothing_was_retrieved_there_is_no_witness() -> None:
    app = LocalApplication(load=Remembers)
    app.retriever.fail = ValueError("no answer")
    events = await app.answered(adaptive(question("r", mode="auto", documents=ATLAS)))
    assert receipt(events).witness_tokens == 0
    assert len(app.target.engine.actor._engine.opened) == 1


async def test_a_target_that_is_replaced_reads_as_a_witness_again() -> None:
    app = LocalApplication(load=Remembers)
    asked = question("r", mode="fused", documents=ATLAS, seed=2_005, max_tokens=60, explain=True)
    events = await app.answered(adaptive(asked), target_dies_after=3)
    assert receipt(events).failovers == ("target lost",)
    document, witness = app.target.engine.actor._engine.opened
    assert witness.committed == document.committed
    assert witness.committed != ((),)
    assert tokens(events) == script(5, 60)


async def test_a_witness_that_fits_nowhere_leaves_no_drafter_behind() -> None:
    app = LocalApplication(
        engine={"max_leases": 1}, speculation={"transfer": "boost"}, drafter_wait_s=0.01
    )
    asked = adaptive(question("r", mode="auto", documents=ATLAS, seed=5, max_tokens=12))
    end = receipt(await app.answered(asked))
    assert (end.contract, end.witness_tokens) == ("target", 0)
    assert end.reason == "no drafter could be had: the target went on alone"


@pytest.mark.parametrize("site", ["target", "orchestrator"])
@pytest.mark.parametrize("dies_after", [None, 4])
async def test_a_witnessed_answer_is_served_as_it_runs_in_process(
    site: str, dies_after: int | None
) -> None:
    app = LocalApplication(load=load_engine, acceptance_site=site)
    asked = question("r", mode="fused", documents=ATLAS, seed=5, max_tokens=40, explain=True)
    dead = app.target.engine
    events = await app.answered(adaptive(asked), target_dies_after=dies_after)
    dead.actor._engine.close()
    for pool in (app.target, app.drafter):
        pool.engine.actor._engine.close()
    read = receipt(events).explanation
    assert read is not None
    in_process = rapid.generate(
        rapid.load("embedded:target"),
        rapid.load("embedded:drafter"),
        read.target_prompt_ids,
        read.drafter_prompt_ids,
        max_tokens=40,
        sampling=SamplingConfig(seed=5),
        speculation=SpeculationConfig(transfer="adaptive"),
    )
    assert read.witness_prompt_ids == read.drafter_prompt_ids  # one template, one tokenizer
    assert tokens(events) == in_process.token_ids


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


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"num_choices": 2}, "goes with one choice"),
        ({"mode": "paper", "temperature": 1.0}, "is not part of mode 'paper'"),
    ],
)
async def test_retrieving_again_is_refused_where_it_is_not_exact(
    asked: dict[str, Any], why: str
) -> None:
    app = LocalApplication()
    with pytest.raises(BadRequest, match=why) as refused:
        await app.answered(question("r", documents=ATLAS, rapid={"refresh": True}, **asked))
    assert refused.value.param == "rapid.refresh"
    lookup = LocalApplication(drafter="prompt_lookup")
    with pytest.raises(BadRequest, match="drafts by prompt lookup"):
        await lookup.answered(question("r", rapid={"refresh": True}))


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


async def test_the_papers_rule_is_refused_where_it_cannot_be_had() -> None:
    app = LocalApplication(load=QueueingEngine)
    greedy = question("r1", mode="paper", documents=ATLAS, temperature=0.0)
    with pytest.raises(BadRequest, match="set a temperature") as refused:
        await app.answered(greedy)
    assert refused.value.param == "temperature"
    app.drafter.fail = RuntimeError("away")
    with pytest.raises(DrafterUnavailable):
        await app.answered(question("r2", mode="paper", documents=ATLAS))


class JudgesWithoutTransfer(FakeEngine):
    """Refuses a lease whose blocks would move the target."""

    async def open(self, request: LeaseRequest) -> None:
        assert request.speculation.eta == 0
        await super().open(request)


@pytest.mark.parametrize("site", ["target", "orchestrator"])
@pytest.mark.parametrize("mode", ["auto", "lossless"])
async def test_prompt_lookup_drafts_without_pool_or_retriever(mode: str, site: str) -> None:
    app = LocalApplication(
        drafter="prompt_lookup", load=JudgesWithoutTransfer, acceptance_site=site
    )
    end_of_answer = ChatText.load("embedded:target").decode(script(5, 60)[40:])
    request = question(
        "r", mode=mode, text=end_of_answer, seed=5, max_tokens=60, num_choices=2, explain=True,
        rapid={"eta": 7.0},
    )  # fmt: skip
    events = await app.answered(request)
    end = receipt(events)
    assert (end.mode, end.contract, end.eta) == ("lossless", "target", 0.0)
    assert "prompt lookup" in end.reason
    assert (end.chunks, end.plain_from) == ((), (None, None))
    for choice in range(2):
        assert tokens(events, choice) == script(5, 60, choice)
    assert end.explanation is not None
    assert {"drafted", "corrected", "target"} == set(end.explanation.origins[0])
    assert end.choices[0].accepted > 5
    assert end.explanation.drafter_prompt_ids == ()


@pytest.mark.parametrize("mode", ["fused", "paper", "rag"])
async def test_prompt_lookup_refuses_what_needs_a_reader(mode: str) -> None:
    app = LocalApplication(drafter="prompt_lookup")
    with pytest.raises(BadRequest, match="configure `drafter`") as refused:
        await app.answered(question("r", mode=mode, documents=ATLAS))
    assert refused.value.param == "rapid.mode"
    assert app.target.num_streams == 0
    with pytest.raises(PromptTooLong, match=r"Shorten it or lower max_tokens\.$"):
        await app.answered(question("r", max_tokens=2000))
    plain = receipt(await app.answered(question("r", mode="plain", seed=5, max_tokens=12)))
    assert (plain.mode, plain.choices[0].drafted) == ("plain", 0)


async def test_prompt_lookup_goes_on_where_a_dead_target_left_off() -> None:
    app = LocalApplication(drafter="prompt_lookup")
    request = question("r", mode="lossless", seed=2_005, max_tokens=60, explain=True)
    events = await app.answered(request, target_dies_after=3)
    assert app.target.num_streams == 2
    assert tokens(events) == script(5, 60)


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
    """Every step of a fake takes 2 ms: a block takes two, plain decoding one for ten tokens."""
    app = LocalApplication(draft_length="measured")
    request = question("r", mode="lossless", seed=2_005, max_tokens=300, explain=True)
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
        "r", mode="fused", documents=ATLAS, seed=5, max_tokens=60, num_choices=2, explain=True
    )
    events = await app.answered(request, target_dies_after=3)
    assert receipt(events).failovers == ("drafter lost", "target lost")
    assert opened[0].companion_tokens > 0
    assert opened[-1].companion_tokens == 0
    assert [tokens(events, choice) for choice in range(2)] == [script(5, 60, 0), script(5, 60, 1)]


class FailsAtStep(FakeEngine):
    """Fails at one of its steps, as often as it is told to, and ends the leases of the step."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.num_steps = 0
        self.fails_at: Callable[[int], bool] = lambda _: False

    async def _compute(self, lease: FakeLease) -> None:
        self.num_steps += 1
        if self.fails_at(self.num_steps):
            self.release(lease.request.lease_id)
            raise EngineFailed("The engine failed at a step; its log says why.")
        await super()._compute(lease)


@pytest.mark.parametrize("site", ["target", "orchestrator"])
@pytest.mark.parametrize("mode", ["plain", "lossless", "fused", "rag"])
async def test_an_engine_that_fails_at_a_step_is_a_lost_target(mode: str, site: str) -> None:
    app = LocalApplication(load=FailsAtStep, acceptance_site=site)
    pool = app.drafter if mode == "rag" else app.target
    pool.engine.actor._engine.fails_at = lambda number: number in (3, 5)
    request = question(
        "r", mode=mode, documents=ATLAS, seed=5, max_tokens=60, num_choices=2, explain=True
    )
    events = await app.answered(request)
    assert receipt(events).failovers == ("target lost", "target lost")
    assert [tokens(events, choice) for choice in range(2)] == [script(5, 60, 0), script(5, 60, 1)]


async def test_a_request_that_no_engine_can_compute_is_given_up_after_the_third() -> None:
    app = LocalApplication(load=FailsAtStep)
    engine = app.target.engine.actor._engine
    engine.fails_at = lambda number: number > 2
    with pytest.raises(EngineFailed, match="its log says why"):
        await app.answered(question("r", mode="plain", seed=5, max_tokens=60))
    assert engine.num_steps == 5
    assert app.target.num_streams == 3


@pytest.mark.parametrize("site", ["target", "orchestrator"])
@pytest.mark.parametrize("mode", ["plain", "fused", "rag"])
async def test_a_target_that_is_silent_is_left_and_the_answer_goes_on(
    mode: str, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.orchestrator.ray_ports._LOOK_EVERY_S", 0.05)
    app = LocalApplication(target_hangs_s=0.5, acceptance_site=site)
    pool = app.drafter if mode == "rag" else app.target
    request = question("r", mode=mode, documents=ATLAS, seed=2_005, max_tokens=60, explain=True)
    events: list[GenerationEvent] = []
    async for event in app.generate(request):
        events.append(event)
        if len(events) == 4:
            silent = pool.engine
            pool.start()
            silent.stop()
    assert receipt(events).failovers == ("target hung",)
    assert receipt(events).plain_from == (None,)
    assert tokens(events) == script(5, 60)


async def test_a_target_that_falls_silent_while_it_reads_is_left_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.orchestrator.ray_ports._LOOK_EVERY_S", 0.05)
    app = LocalApplication(target_hangs_s=0.5, load=lambda c: FakeEngine(c, prefill_s=0.3))
    events: list[GenerationEvent] = []
    async for event in app.generate(question("r", mode="plain", seed=5, explain=True)):
        events.append(event)
        if isinstance(event, Started):
            silent = app.target.engine
            app.target.start()
            silent.stop()
    assert receipt(events).failovers == ("target hung",)
    assert tokens(events) == script(5, 24)


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


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"rapid": {"all_draft_tokens": True, "max_draft": 64}}, "rapid.draft_top_k"),
        ({"retrieval_tokens": 10**9}, "rapid.retrieval_tokens"),
        ({"retrieval_tokens": 10**9, "mode": "rag"}, "rapid.retrieval_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": 10**9, "mode": "rag"}, "max_tokens"),
        ({"documents": (Document("long", "The lighthouse of Varo. " * 9_000),)}, "messages"),
    ],
)
async def test_what_can_never_be_answered_is_refused_without_a_lease_or_a_search(
    settings: dict[str, Any], param: str
) -> None:
    app = LocalApplication()
    app._services.prompts.vocab_size = 128_256  # blocks without a cut would have 65 MB
    with pytest.raises(BadRequest) as refused:
        await app.answered(question("r", **settings))
    assert refused.value.param == param
    assert app.target.num_streams == app.drafter.num_streams == 0
    assert not app.retriever.queries


async def test_the_salt_of_a_request_reaches_all_of_its_leases() -> None:
    salts: list[str] = []

    class Recording(FakeEngine):
        async def open(self, request: LeaseRequest) -> None:
            salts.append(request.cache_salt)
            await super().open(request)

    app = LocalApplication(load=Recording)
    await app.answered(question("r", mode="fused", documents=ATLAS, cache_salt="mine"))
    assert set(salts) == {"mine"}
    assert len(salts) > 1
