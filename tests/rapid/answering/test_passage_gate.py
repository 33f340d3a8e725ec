"""Passages are read apart where the pair was measured to bear it, and answers stay the target's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

import rapid
from rapid.answering import passage_gate
from rapid.answering.passage_gate import (
    PassageGate,
    ask_generated,
    compute_share_kept,
    is_settled,
    measure_overlaps,
)
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig
from rapid.embedded.generator import generate_document
from rapid.errors import EngineFailed
from tests.rapid.answering.prompt.excerpts.test_passage_order import numbered
from tests.rapid.answering.prompt.test_prompting import (
    ATLAS,
    ScriptedRetriever,
    chat_text,
    context,
    prompter,
    request,
)

__all__ = ["chat_text"]
NONE: Any = SimpleNamespace()  # prompts and pools that a scripted measurement does not ask for


def script(monkeypatch: pytest.MonkeyPatch, *told: tuple[float, float, int] | Exception) -> None:
    """Let the questions give these overlaps, the last of them for all that follow."""

    async def measure(*_: object, seed: int) -> tuple[float, float, int]:
        found = told[min(seed, len(told) - 1)]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(passage_gate, "measure_overlaps", measure)


async def judge(gate: PassageGate) -> PassageGate:
    assert not gate.is_open
    gate.begin(NONE, NONE)
    gate.begin(NONE, NONE)  # once is enough
    assert not gate.is_open
    assert "being measured" in gate.reason
    await gate.wait()
    return gate


async def test_a_pair_that_bears_it_opens_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, (9.9, 10.0, 20))
    gate = await judge(PassageGate(is_wanted=True))
    assert gate.is_open
    assert gate.reason == "0.990 of the overlap stays over 12 generated questions"


async def test_a_pair_that_loses_too_much_keeps_it_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, (9.0, 10.0, 20))
    gate = await judge(PassageGate(is_wanted=True))
    assert not gate.is_open
    assert gate.reason.endswith("at least 0.97 is asked")


@pytest.mark.parametrize("error", [EngineFailed("gone"), ValueError("a fault of ours")])
async def test_what_cannot_be_measured_stays_shut(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    script(monkeypatch, (10.0, 10.0, 20), error)
    gate = await judge(PassageGate(is_wanted=True))
    assert not gate.is_open
    assert "could not be measured" in gate.reason


async def test_after_a_failure_it_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, EngineFailed("loading"))
    gate = await judge(PassageGate(is_wanted=True))
    script(monkeypatch, (9.9, 10.0, 20))
    gate.begin(NONE, NONE)
    await gate.wait()
    assert not gate.is_open  # not at once
    monkeypatch.setattr(gate, "_again_at", 0.0)
    gate.begin(NONE, NONE)
    await gate.wait()
    assert gate.is_open


async def test_nothing_is_measured_where_it_is_not_wanted() -> None:
    gate = PassageGate()
    gate.begin(NONE, NONE)
    await gate.wait()
    await gate.end()
    assert (gate.is_open, gate.reason) == (False, "passage_cache_tokens is 0")


async def test_who_closes_the_pair_stops_the_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(*_: object, **__: object) -> tuple[float, float, int]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(passage_gate, "measure_overlaps", measure)
    gate = PassageGate(is_wanted=True)
    gate.begin(NONE, NONE)
    await asyncio.sleep(0)
    await gate.end()
    assert not gate.is_open


def test_close_calls_take_more_questions() -> None:
    near = [(9.6, 10.0, 20), (9.8, 10.0, 20)] * 30
    assert not is_settled(near[:11])
    assert not is_settled(near[:30])
    assert is_settled(near)
    assert compute_share_kept(near) == pytest.approx(0.97)
    assert is_settled([(9.0, 10.0, 20), (9.1, 10.0, 20)] * 6)


async def test_passages_are_the_same_tokens_wherever_they_stand(chat_text: ChatText) -> None:
    retriever = ScriptedRetriever(None)
    prompts, seen = prompter(chat_text, retriever), dict[str, set[tuple[int, ...]]]()
    for numbers in ((4, 6, 8), (2, 4), (8, 9)):
        retriever.answer = context(*numbered(*numbers))
        found = await prompts.drafter_prompt(request(ATLAS), ignores_drafts=True)
        assert len(found.passages) == len(numbers)
        assert all(stop == start for (_, stop), (start, _) in pairwise(found.passages))
        for start, stop in found.passages:
            ids = tuple(found.prompt_ids[start:stop].tolist())
            seen.setdefault(chat_text.decode(ids).strip(), set()).add(ids)
    assert set(seen) == {each.text.strip() for each in numbered(2, 4, 6, 8, 9)}
    assert all(len(each) == 1 for each in seen.values())
    assert not (await prompts.drafter_prompt(request(ATLAS))).passages
    prompts.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[rapid.Pair]:
    target = EngineConfig(model="embedded:target", max_context=4096, kv_cache_tokens=8192)
    drafter = target.model_copy(update={"model": "embedded:drafter", "passage_cache_tokens": 4096})
    never = pytest.MonkeyPatch()
    never.setattr(PassageGate, "begin", lambda *_: None)
    with rapid.open(target, drafter=drafter) as opened:
        yield opened
    never.undo()


def test_the_embedded_pair_can_be_measured(pair: rapid.Pair) -> None:
    asked = ask_generated(0)
    services = pair._services
    apart, together, length = pair._loop.run(
        lambda: measure_overlaps(services.prompts, services.pools, asked, 0)
    )
    assert 0 < length <= 24
    assert apart == pytest.approx(together, abs=0.2 * length)
    assert 0 < together <= length


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}])
def test_answers_are_those_of_plain_decoding(pair: rapid.Pair, settings: dict[str, Any]) -> None:
    gate = pair._services.gate
    document = generate_document("read apart", 1500)
    reused = 0
    for question in document.questions[:2]:
        asked: dict[str, Any] = {"documents": [document.text], "max_tokens": 40, **settings}
        plain = pair.answer(question.question, mode="plain", **asked)
        gate.is_open = True
        apart = pair.answer(question.question, mode="lossless", **asked)
        fused = pair.answer(question.question, mode="fused", **asked)
        gate.is_open = False
        shut = pair.answer(question.question, mode="lossless", **asked)
        assert plain.text == apart.text == shut.text
        for read in (apart, shut):
            assert read.receipt.contract == "target"
        told = apart.receipt.passages, shut.receipt.passages, fused.receipt.passages
        assert told[0] is None or told[0].reading == "apart"
        assert told[1] is None or told[1].reading == "together"
        assert told[2] is not None
        assert told[2].reason == "the answer depends on what is drafted"
        reused += told[0].reused_tokens if told[0] else 0
    assert reused > 0
