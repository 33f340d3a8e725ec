"""`auto` asks the drafter whether what was retrieved answers the question, where it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from math import inf, log
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

import rapid
from rapid.answering.mode.answerable import ALTERNATIVES, append_question, log_odds
from rapid.chat_messages import Message
from rapid.checkpoints.text import ChatText
from rapid.embedded import DRAFTER
from rapid.errors import EngineFailed
from rapid.messages import LeaseRequest, TokenLogprobs, Verdict
from tests.answered import ATLAS, receipt
from tests.fakes import FakeEngine
from tests.local_pools import LocalApplication
from tests.ray_cluster import question

WORDS = {1: "Yes", 2: " yes", 3: "no", 4: "Not", 5: "y", 6: "", 7: "none"}
TEXT = ChatText.load("embedded:drafter")


def said(*alternatives: tuple[int, float]) -> TokenLogprobs:
    top = tuple((token_id, log(chance)) for token_id, chance in alternatives)
    return TokenLogprobs(top[0][0], top[0][1], top)


@pytest.mark.parametrize(
    ("word", "odds"),
    [
        (said((1, 0.4), (2, 0.2), (3, 0.3)), 2.0),
        (said((3, 0.6), (4, 0.2), (5, 0.2)), 1 / 3),
        (said((1, 0.9), (4, 0.05)), 18.0),
        (said((3, 0.8), (7, 0.1)), 1 / 8),
    ],
    ids=["spellings add up", "a first piece counts", "no no", "no yes"],
)
def test_the_odds_are_those_of_two_words(word: TokenLogprobs, odds: float) -> None:
    assert log_odds(word, lambda ids: WORDS[ids[0]]) == pytest.approx(log(odds))


def test_a_drafter_that_says_neither_word_finds_no_answer() -> None:
    assert log_odds(said((4, 0.5), (6, 0.5)), lambda ids: WORDS[ids[0]]) == -inf


def test_the_question_stays_where_it_is_and_ours_follows() -> None:
    chat = (Message("system", "Be brief."), Message("user", "Who?"))
    before, ours = append_question(chat)
    assert before == chat[0]
    assert ours.content.startswith("Who?\n\n")


class Says(FakeEngine):
    """Says one word to whoever asks for alternatives, and remembers what it was asked."""

    word = "yes"
    asked: list[tuple[int, ...]] = []  # noqa: RUF012 (of the test's own class)
    opened: list[LeaseRequest] = []  # noqa: RUF012
    most_open = 0
    dying: ClassVar[asyncio.Event]

    async def open(self, request: LeaseRequest) -> None:
        await super().open(request)
        self.opened.append(request)
        is_open = [lease for lease in self.leases.values() if not lease.closed.is_set()]
        self.most_open = max(self.most_open, len(is_open))

    async def decode(self, lease_id: str, choice: int, num_tokens: int) -> Verdict:
        lease = self._lease(lease_id)
        if lease.request.terms.num_logprobs != ALTERNATIVES:
            return await super().decode(lease_id, choice, num_tokens)
        self.asked.append(tuple(lease.request.prompt_ids.tolist()))
        if self.word == "fails":
            raise EngineFailed("out of memory")
        if self.word == "dies":
            self.dying.set()
            await asyncio.Event().wait()
        token_id = TEXT.encode(self.word)[0]
        word = TokenLogprobs(token_id, log(0.9), ((token_id, log(0.9)), (700, log(0.05))))
        verdict = await super().decode(lease_id, choice, num_tokens)
        return replace(verdict, logprobs=(word,))


def saying(a_word: str) -> type[Says]:
    class Saying(Says):
        word = a_word
        asked: list[tuple[int, ...]] = []  # noqa: RUF012
        opened: list[LeaseRequest] = []  # noqa: RUF012

    return Saying


async def until_idle(app: LocalApplication) -> None:
    """Wait until every lease is given back."""
    async with asyncio.timeout(10):
        for pool in (app.target, app.drafter):
            engine = pool.engine.actor._engine
            for lease in list(engine.leases.values()):
                await lease.closed.wait()
            engine.check_integrity()


@pytest.mark.parametrize("drafter", [None, "target"])
@pytest.mark.parametrize(("word", "mode"), [("yes", "fused"), ("no", "plain")])
async def test_auto_fuses_when_the_drafter_finds_the_answer(word, mode, drafter) -> None:
    engine = saying(word)
    app = LocalApplication(load=engine, drafter=drafter, answerable_log_odds=0.5)
    end = receipt(await app.answered(question("r", documents=ATLAS, seed=5, max_tokens=12)))
    assert (end.mode, len(engine.asked)) == (mode, 1)
    assert "drafter" in end.reason
    assert bool(end.chunks) is (mode == "fused")
    asks = [each for each in engine.opened if each.terms.num_logprobs == ALTERNATIVES]
    assert [each.companion_tokens > 0 for each in asks] == [drafter == "target"]
    drafts = app.target if drafter == "target" else app.drafter
    most = 1 + (drafter == "target")  # the lease of the word is given back before the drafting one
    assert drafts.engine.actor._engine.most_open == most
    await until_idle(app)


@pytest.mark.parametrize("mode", ["fused", "lossless", "plain", "rag"])
async def test_nobody_else_asks(mode: str) -> None:
    engine = saying("no")
    app = LocalApplication(load=engine, answerable_log_odds=0.5)
    asks = question("r", mode=mode, documents=ATLAS, seed=5, max_tokens=12)
    assert receipt(await app.answered(asks)).mode == mode
    assert engine.asked == []


async def test_a_drafter_that_gives_no_word_counts_as_none() -> None:
    app = LocalApplication(load=saying("fails"), answerable_log_odds=0.5)
    end = receipt(await app.answered(question("r", documents=ATLAS, seed=5, max_tokens=12)))
    assert (end.mode, end.is_fallback, end.failovers) == ("plain", True, ())
    await until_idle(app)


async def test_a_drafter_that_dies_when_asked_is_no_lost_target() -> None:
    engine = saying("dies")
    engine.dying = asyncio.Event()
    app = LocalApplication(load=engine, answerable_log_odds=0.5)
    dead = app.drafter.engine

    async def strike() -> None:
        await engine.dying.wait()
        app.drafter.start()
        dead.kill()

    striking = asyncio.ensure_future(strike())
    end = receipt(await app.answered(question("r", documents=ATLAS, seed=5, max_tokens=12)))
    await striking
    assert (end.mode, end.is_fallback, end.failovers) == ("plain", True, ())


def test_the_word_is_that_of_the_model_on_what_it_drafts_from(monkeypatch) -> None:
    prompts = []
    encode = ChatText.encode_chat

    def watched(text: ChatText, messages: Sequence[Message], **settings: Any) -> list[int]:
        ids = encode(text, messages, **settings)
        if messages[-1].content.endswith("yes or no."):
            prompts.append(ids)
        return ids

    words = []
    monkeypatch.setattr(ChatText, "encode_chat", watched)
    monkeypatch.setattr(
        "rapid.answering.mode.answerable.log_odds", lambda word, _: words.append(word) or 1
    )
    text = "The harbor of Bakeno is dolu maki 482. " * 4
    with rapid.open("embedded:target", drafter="embedded:drafter", answerable_log_odds=0.5) as pair:
        answer = pair.answer("What is the harbor of Bakeno?", documents=[text], temperature=0)
    assert answer.receipt.mode == "fused"
    model = AutoModelForCausalLM.from_pretrained(DRAFTER).eval()
    best = model(torch.tensor(prompts)).logits[0, -1].log_softmax(-1).topk(ALTERNATIVES)
    ids, logprobs = zip(*words[0].top, strict=True)
    assert ids == tuple(best.indices.tolist())
    assert logprobs == pytest.approx(best.values.tolist(), abs=1e-3)
