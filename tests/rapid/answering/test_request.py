"""The life of a request when things fail: real loop and leases over pools within this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from grpc import StatusCode  # type: ignore[import-untyped]
from grpc.aio import AioRpcError, Metadata  # type: ignore[import-untyped]
from ray.serve.exceptions import DeploymentUnavailableError

import rapid
from deployments.api.http.error_responses import http_error
from deployments.pools.engine_actor import load_engine
from rapid.chat_messages import Document
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.errors import (
    BadRequest,
    DrafterUnavailable,
    EngineFailed,
    Overloaded,
    PromptTooLong,
    RetrievalUnavailable,
)
from rapid.events import GenerationEvent, Started, TextDelta
from rapid.messages import LeaseRequest, Verdict
from tests.answered import ATLAS, receipt, script, text, tokens
from tests.fakes import FakeEngine, FakeLease
from tests.local_pools import LocalApplication, QueueingEngine
from tests.ray_cluster import question

BROKEN = [
    DeploymentUnavailableError("Drafter"),  # type: ignore[arg-type]
    RuntimeError("Unexpected error (StatusCode.CANCELLED): closing."),
    ValueError("a bug in the replica"),
    AioRpcError(StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata(), "full"),
]


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


@pytest.mark.parametrize(
    ("asked", "whose"),
    [
        ({"mode": "fused", "max_tokens": 1020}, "drafter's context of 1024"),
        ({"mode": "rag", "max_tokens": 1020}, "drafter's context of 1024"),
        ({"mode": "rag", "max_tokens": 1024}, "drafter's context of 1024"),
        ({"mode": "fused", "max_tokens": 4090}, "target's context of 4096"),
    ],
)
async def test_what_does_not_fit_names_the_model_whose_context_is_too_short(asked, whose) -> None:
    app = LocalApplication(engine={"max_context": 4096, "kv_cache_tokens": 8192})
    with pytest.raises(PromptTooLong, match=whose) as refused:
        await app.answered(question("r", documents=ATLAS, **asked))
    context = whose.split()[-1]
    start = f"This model's maximum context length is {context} tokens. "  # litellm looks for it
    assert str(refused.value).startswith(start)
    assert refused.value.code == "context_length_exceeded"


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


@pytest.mark.parametrize("mode", ["fused", "paper", "rag"])
async def test_a_broken_retriever_is_an_error_of_a_mode_that_needs_it(mode: str) -> None:
    app = LocalApplication()
    app.retriever.fail = ValueError("http://me:secret@qdrant:6333 answered 500")
    with pytest.raises(RetrievalUnavailable, match="retrieval did not answer") as refused:
        await app.answered(question("r", mode=mode, documents=ATLAS))
    error = http_error(refused.value)
    assert (error.status, error.body["error"]["code"]) == (503, "retrieval_unavailable")
    assert "secret" not in str(error.body)
    for pool in (app.target, app.drafter):
        for lease in list(pool.engine.actor._engine.leases.values()):
            await lease.closed.wait()


@pytest.mark.parametrize(("mode", "contract"), [("fused", "target"), ("rag", "drafter")])
async def test_a_search_that_finds_nothing_is_answered_and_the_receipt_says_so(
    mode: str, contract: str
) -> None:
    app = LocalApplication()
    app.retriever.finds_nothing = True
    end = receipt(await app.answered(question("r", mode=mode, documents=ATLAS)))
    assert (end.mode, end.contract, end.is_fallback) == (mode, contract, True)
    assert end.reason.startswith("asked for, but retrieval found nothing above its floor")


async def test_rag_without_documents_takes_no_lease() -> None:
    app = LocalApplication()
    with pytest.raises(BadRequest, match=r"rapid\.mode 'rag' answers from what retrieval finds"):
        await app.answered(question("r", mode="rag"))
    assert app.drafter.num_streams == 0


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
        assert request.terms.speculation.eta == 0
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


@pytest.mark.parametrize("site", ["target", "orchestrator"])
@pytest.mark.parametrize("lacks", ["drafter", "retriever"])
async def test_lossless_is_drafted_from_the_text_where_there_is_nobody_else(
    lacks: str, site: str
) -> None:
    app = LocalApplication(draft_length="measured", acceptance_site=site)
    if lacks == "drafter":
        app.drafter.fail = Overloaded("The queue of the Drafter pool is full.", 7.2)
    else:
        app.retriever.fail = ValueError("away")
    end_of_answer = ChatText.load("embedded:target").decode(script(5, 60)[10:])
    asked = question(
        "r", mode="lossless", text=end_of_answer, documents=ATLAS, seed=5, max_tokens=60,
        explain=True,
    )  # fmt: skip
    events = await app.answered(asked)
    end = receipt(events)
    cause = {"drafter": "no drafter", "retriever": "retrieval lost"}[lacks]
    assert (end.mode, end.contract, end.cause) == ("lossless", "target", cause)
    assert (end.is_fallback, end.plain_from, end.failovers) == (True, (None,), ())
    assert tokens(events) == script(5, 60)
    (choice,) = end.choices
    assert choice.accepted > 5
    assert "on with drafts from its own text; of " in end.reason
    assert end.reason.endswith(f"{choice.drafted} tokens that the text itself drafted "
        f"{choice.accepted} were kept")  # fmt: skip
    for changed in ({"coupling": "maximal"}, {"refresh": True}):
        other = replace(asked.speculation, **changed)
        other_end = receipt(await app.answered(replace(asked, speculation=other)))
        assert (other_end.mode, other_end.choices[0].drafted) == ("plain", 0)


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
    monkeypatch.setattr("deployments.orchestrator.engine_calls._LOOK_EVERY_S", 0.05)
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
    monkeypatch.setattr("deployments.orchestrator.engine_calls._LOOK_EVERY_S", 0.05)
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
