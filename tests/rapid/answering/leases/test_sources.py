"""Sources of drafts: the witness beside an answer, whose reading is the target's own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import rapid
from deployments.pools.engine_actor import load_engine
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.errors import EngineFailed
from rapid.events import GenerationEvent, TextDelta
from rapid.messages import GenerateRequest, LeaseRequest, Verdict
from tests.answered import ATLAS, receipt, script, tokens
from tests.fakes import FakeEngine
from tests.local_pools import FOUND, LocalApplication
from tests.ray_cluster import question


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


class RefusesBeside(FakeEngine):
    """It opens no second lease."""

    async def open(self, request: LeaseRequest) -> None:
        if request.beside is not None:
            raise EngineFailed("out of memory")
        await super().open(request)


async def test_a_drafter_without_a_witness_is_given_back_before_the_answer_begins() -> None:
    app = LocalApplication(load=RefusesBeside)
    drafter = app.drafter.engine.actor._engine
    held = []
    async for event in app.generate(adaptive(question("r", mode="auto", documents=ATLAS, seed=5))):
        if isinstance(event, TextDelta):
            held.append(len(drafter.leases))
    assert set(held) == {0}


async def test_a_witness_reads_what_is_retrieved_again() -> None:
    app = LocalApplication(load=Remembers)
    app.drafter.load = lambda: FakeEngine(app.config.drafter_pool.engine, wrong_every=7)
    app.drafter.start()
    app.retriever.chunk_again = replace(FOUND, id="d:1", text="The well of Ruki is dry.")
    asked = adaptive(question("r", mode="fused", documents=ATLAS, seed=5, max_tokens=12))
    asked = replace(asked, speculation=replace(asked.speculation, refresh=True))
    assert receipt(await app.answered(asked)).choices[0].refreshes == 1
    target = app.target.engine.actor._engine
    _, first, again = target.opened
    text = ChatText.load("embedded:target")
    assert "lighthouse of Varo is white" in text.decode(first.prompt_ids.tolist())
    assert "well of Ruki is dry" in text.decode(again.prompt_ids.tolist())
    assert again.committed == (script(5, 7),)
    assert list(dict.fromkeys(target.told)) == [first.lease_id, again.lease_id]


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
    asked = adaptive(question("r", mode="auto", documents=ATLAS, seed=2_005, max_tokens=12))
    events: list[GenerationEvent] = []
    async for event in app.generate(asked):
        events.append(event)
        if isinstance(event, TextDelta):
            assert app.drafter.engine.actor._engine.leases == {}
    end = receipt(events)
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
        num_logprobs=0,
    )
    assert read.witness_prompt_ids == read.drafter_prompt_ids  # one template, one tokenizer
    assert tokens(events) == in_process.token_ids
    told = [token.sampled for token in read.tokens[0]]  # at either site, and by a new target
    fused = [math.exp(each.logprob) for each in in_process.logprobs or ()]
    assert told == pytest.approx(fused[: len(told)], rel=1e-4, abs=1e-5)
    assert all(token.target is not None and token.drafter is not None for token in read.tokens[0])
