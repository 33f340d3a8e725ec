"""Citations of answers by the real loop: with engines that compute, and with scripted ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import rapid
from deployments.pools.engine_actor import load_engine
from rapid.answering.receipt import citing
from rapid.chat_messages import Document
from rapid.citing.copies import CitingRule
from rapid.errors import UnknownDocument
from rapid.events import GenerationEvent, Started
from rapid.pair.pair import Pair
from rapid.receipt import Citations
from tests.answered import ATLAS, receipt, text
from tests.local_pools import FOUND, LocalApplication
from tests.ray_cluster import question

FILLER = "Nobody asked about the valley of Moru at dusk. The people of Gita sells rope. " * 2
FACTS = (
    f"{FILLER}The banner of Tezawe is sozo sema 40. {FILLER}The well of Ruki is dimu 7. {FILLER}"
)
ASKED = "What is the banner of Tezawe?"
NOTHING_IS_COPIED = CitingRule(least_words=99, most_rare=0)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with rapid.open("embedded:target", drafter="embedded:drafter") as opened:
        yield opened


def cited(pair: Pair, mode: str, **settings: Any) -> Citations:
    answer = pair.answer(
        ASKED,
        documents=[Document("facts", FACTS)],
        mode=mode,  # type: ignore[arg-type]
        citations=True,
        **settings,
    )
    found = answer.receipt.citations
    assert found is not None
    for citation in found.found:
        assert citation.quote == FACTS[citation.document_start : citation.document_end]
        assert 0 <= citation.start < citation.end <= len(answer.text)
    for pool in (pair._services.pools.target, pair._services.pools.alone):
        assert pool.engine.status().leases_open == 0  # type: ignore[attr-defined]
        pool.engine.check_integrity()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("mode", ["fused", "lossless", "rag", "plain"])
def test_a_sentence_of_the_document_is_copied_in_every_mode(pair: Pair, mode: str) -> None:
    found = cited(pair, mode)
    (citation,) = found.found
    assert (citation.evidence, citation.document, citation.fall) == ("copied", "facts", None)
    assert citation.quote == "The banner of Tezawe is sozo sema 40."
    assert (citation.passage_id is None) == (mode == "plain")
    assert found.unsupported == ()
    assert found.needed.startswith("not measured: ")


@pytest.mark.parametrize("mode", ["fused", "lossless", "rag"])
def test_what_is_not_copied_is_from_the_passage_that_the_drafter_needed(
    pair: Pair, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(citing, "RULE", NOTHING_IS_COPIED)
    found = cited(pair, mode)
    (citation,) = found.found
    assert (citation.evidence, found.needed) == ("needed", "measured")
    assert "The banner of Tezawe is sozo sema 40." in citation.quote
    assert citation.fall is not None
    assert citation.fall > 5


def test_without_a_drafter_words_alone_say_what_a_passage_has(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(citing, "RULE", NOTHING_IS_COPIED)
    monkeypatch.setattr(citing, "PoolSource", int)
    found = cited(pair, "fused")
    assert [citation.evidence for citation in found.found] == ["present"]
    assert found.needed == "not measured: no drafter has read passages"
    assert [each.evidence for each in cited(pair, "plain").found] == []


def test_nothing_is_computed_for_who_does_not_ask(pair: Pair) -> None:
    engine = pair._services.pools.alone.engine  # type: ignore[attr-defined]

    def count(**settings: Any) -> int:
        before = engine.status().steps
        answer = pair.answer(ASKED, documents=[FACTS], mode="rag", max_tokens=8, **settings)
        assert (answer.receipt.citations is None) == (not settings)
        return int(engine.status().steps - before)

    count()
    usual = count()
    assert (count(), count(citations=True)) == (usual, usual)  # for what is copied, neither


async def test_a_servers_pools_measure_what_an_answer_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(citing, "RULE", NOTHING_IS_COPIED)
    app = LocalApplication(load=load_engine)
    app.retriever.chunk = replace(FOUND, document="facts", text=FACTS, end=len(FACTS))
    facts = (Document("facts", FACTS),)
    asked = question("r", mode="fused", text=ASKED, documents=facts, citations=True, seed=1)
    found = receipt(await app.answered(asked)).citations
    for pool in (app.target, app.drafter):
        pool.engine.actor._engine.close()
    assert found is not None
    assert [(each.evidence, each.passage_id) for each in found.found] == [("needed", "d:0")]
    assert found.needed == "measured"


async def test_scripted_engines_leave_out_nothing_and_the_receipt_says_so() -> None:
    app = LocalApplication()
    asked = question(
        "r", mode="fused", documents=ATLAS, citations=True, max_tokens=40, seed=3, num_choices=2
    )
    app.retriever.chunk = replace(FOUND, text=" ".join(text(await app.answered(asked), 0).split()))
    events = await app.answered(asked)
    found = receipt(events).citations
    assert found is not None
    places = [(each.choice, each.start, each.end) for each in found.found] + [*found.unsupported]
    assert {choice for choice, *_ in places} == {0, 1}
    assert all(0 <= start < stop <= len(text(events, choice)) for choice, start, stop in places)
    why = "not measured: the drafter's engine leaves out no part of a prompt"
    assert found.needed == why


async def test_a_quote_that_does_not_stand_in_its_document_is_no_citation() -> None:
    app = LocalApplication()
    asked = question("r", mode="fused", documents=ATLAS, citations=True, max_tokens=40, seed=3)
    told = text(await app.answered(asked), 0)
    app.retriever.chunk = replace(FOUND, text=told, end=len(told))
    found = receipt(await app.answered(asked)).citations
    assert found is not None
    assert found.found == ()
    assert found.unsupported


async def test_of_a_document_that_is_deleted_meanwhile_its_passages_are_left() -> None:
    app = LocalApplication()
    asked = question("r", mode="fused", documents=ATLAS, citations=True, max_tokens=40, seed=3)
    told = text(await app.answered(asked), 0)
    app.retriever.chunk = replace(FOUND, text=told, end=len(told))
    events = app.generate(asked)
    seen: list[GenerationEvent] = []
    async for event in events:
        seen.append(event)
        app._services.prompts._resolver = NoDocuments()
    found = receipt(seen).citations
    assert found is not None
    assert {(citation.document, citation.evidence) for citation in found.found} == {
        ("atlas", "copied")
    }


class NoDocuments:
    """Every document is deleted."""

    async def resolve(self, tenant: str, documents: Any) -> Any:
        raise UnknownDocument("it is deleted")


async def test_a_lost_drafter_leaves_what_words_say() -> None:
    app = LocalApplication()
    events = []
    asked = question("r", mode="lossless", documents=ATLAS, citations=True, seed=50_003)
    async for event in app.generate(asked):
        events.append(event)
        if isinstance(event, Started):
            app.drafter.engine.kill()
    found = receipt(events).citations
    assert found is not None
    assert found.needed.startswith("not measured: ")


async def test_a_drafter_that_rests_is_kept_until_it_is_asked() -> None:
    app = LocalApplication(draft_length="measured")
    asked = question("r", mode="lossless", seed=20_005, max_tokens=120, citations=True)
    held = []
    async for _ in app.generate(asked):
        roles = [name.split("/")[1][:7] for name in app.drafter.engine.actor._engine.leases]
        held.append(roles.count("drafter"))
    assert set(held) == {1}
