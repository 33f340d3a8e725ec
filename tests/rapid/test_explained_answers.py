"""Explained answers of the embedded pair: each number is what plain forwards give for its token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.api.dialects.chat.wire import rapid_receipt
from rapid import reference
from rapid.answering.request import RequestRun
from rapid.answering.run import Run
from rapid.embedded.generator import generate_document
from rapid.engines.work import base
from rapid.pair.asking import as_request
from rapid.pair.pair import Pair
from rapid.pair.pair_stream import Stream
from rapid.receipt import Receipt
from rapid.replay import ReplayModels, read_receipt
from rapid.speculation import statistics
from tests.rapid.test_replay import models, pair

__all__ = ["models", "pair"]  # fixtures

DOCUMENT = generate_document(7, 1500)
QUESTION = DOCUMENT.questions[0].question


def ask(pair: Pair, *, explain: bool = True, **settings: Any) -> tuple[str, Receipt]:
    settings = {"temperature": 0.8, "max_tokens": 24, "seed": 7} | settings
    request = as_request("a", QUESTION, [DOCUMENT.text], settings, is_streamed=False)
    stream = Stream(
        pair._loop, RequestRun(pair._services, replace(request, explain=explain)).events()
    )
    text = "".join(stream)
    assert stream.answer is not None
    return text, stream.answer.receipt


def define(receipt: Receipt, models: ReplayModels, temperature: float) -> Iterator[Any]:
    """Yield p, q and p_hat of each token of an answer without filters, by plain forwards."""
    explained = receipt.explanation
    assert explained is not None
    settings = reference.Settings(
        temperature=temperature, transfer=receipt.transfer, eta=receipt.eta,
        plausibility=receipt.plausibility, draft_top_k=receipt.draft_top_k,
        transfer_temperature=receipt.transfer_temperature,
    )  # fmt: skip
    target, drafter, witness = (
        models.reader(role, ids) if ids else None
        for role, ids in (
            ("target", explained.target_prompt_ids),
            ("drafter", explained.drafter_prompt_ids),
            ("target", explained.witness_prompt_ids),
        )
    )
    (token_ids,), odds = explained.token_ids, 0.0
    for position, token in enumerate(token_ids):
        before = token_ids[:position]
        if receipt.mode == "rag":
            prob = reference.softmax(drafter.logits(before)[0], settings)[token]
            yield None, prob, prob
            continue
        logits = target.logits(before)[0]
        p = reference.softmax(logits, settings)
        if drafter is None:
            yield p[token], None, p[token]
            continue
        q = told = reference.propose(drafter.logits(before)[0], settings)
        if witness is not None:
            told = (q + reference.softmax(witness.logits(before)[0], settings)) / 2
        fused = reference.fuse(logits, told, settings, odds)
        odds = 0.85 * odds + np.log(max(told[token], 1e-3) / max(p[token], 1e-3))
        yield p[token], q[token], fused[token]


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "plain"},
        {"mode": "plain", "temperature": 0.0},
        {"mode": "rag"},
        {"mode": "rag", "temperature": 0.0},
        {"mode": "lossless"},
        {"mode": "lossless", "temperature": 0.0},
        {"mode": "lossless", "coupling": "maximal", "temperature": 1.5},
        {"mode": "fused"},
        {"mode": "fused", "temperature": 0.0},
        {"mode": "fused", "temperature": 1.5, "coupling": "maximal"},
        {"mode": "fused", "temperature": 1.5, "transfer": "boost", "eta": 3.0},
        {"mode": "paper", "temperature": 1.5},
    ],
    ids=str,
)
def test_each_token_has_the_numbers_that_plain_forwards_give(pair, models, settings, monkeypatch):
    monkeypatch.setattr(Run, "drafts_from_text", False)  # which has no number, and is measured
    text, receipt = ask(pair, **settings)
    explained = receipt.explanation
    assert explained is not None
    (tokens,) = explained.tokens
    assert "".join(token.text for token in tokens) == text
    assert not explained.truncated
    if receipt.mode == "rag":
        assert {token.writer for token in tokens} == {"drafter"}
    else:
        assert (tuple(token.writer for token in tokens),) == explained.origins
    temperature = settings.get("temperature", 0.8)
    for token, defined in zip(tokens, define(receipt, models, temperature), strict=True):
        told = [token.target, token.drafter, token.sampled]
        alone = token.writer in ("target", "bonus")  # no drafter was asked there
        expected = (defined[0], None, defined[0]) if alone else defined
        for number, exact in zip(told, expected, strict=True):
            assert number == (None if exact is None else pytest.approx(exact, rel=2e-4, abs=1e-5))


def test_words_that_a_passage_has_are_told_with_it(pair):
    _, receipt = ask(pair, mode="fused", temperature=0.0)
    explained = receipt.explanation
    assert explained is not None
    found = {chunk.id: DOCUMENT.text[chunk.start : chunk.end] for chunk in receipt.chunks}
    copied = [token for token in explained.tokens[0] if token.passage]
    assert copied
    assert all(token.text.strip() in found[token.passage] for token in copied)
    _, plain = ask(pair, mode="plain")  # in which nobody reads passages
    assert plain.explanation is not None
    assert not any(token.passage for token in plain.explanation.tokens[0])


def test_long_answers_are_explained_as_far_as_there_is_room(pair, monkeypatch):
    for place in ("rapid.messages", "rapid.answering.receipt.explaining"):
        monkeypatch.setattr(f"{place}.MOST_EXPLAINED", 5)
    _, receipt = ask(pair, mode="fused", ignore_eos=True, max_tokens=40)
    explained = receipt.explanation
    assert explained is not None
    assert explained.truncated
    assert len(explained.tokens[0]) == 5
    assert len(explained.token_ids[0]) == 40


def test_an_answer_that_is_not_explained_ships_and_keeps_no_numbers(pair, monkeypatch):
    verdicts, asked = [], []
    observe, explains = statistics.RoundStatistics.observe, base.SequenceWork._explains
    monkeypatch.setattr(
        statistics.RoundStatistics,
        "observe",
        lambda self, verdict: (verdicts.append(verdict), observe(self, verdict)),
    )
    monkeypatch.setattr(
        base.SequenceWork, "_explains", lambda self: asked.append(explains(self)) or asked[-1]
    )
    _, receipt = ask(pair, explain=False, mode="fused")
    assert receipt.explanation is None
    assert verdicts
    assert not any(verdict.probs for verdict in verdicts)
    assert asked
    assert not any(asked)
    verdicts.clear()
    ask(pair, mode="fused")
    assert sum(len(each.probs) for each in verdicts) == sum(
        len(each.token_ids) for each in verdicts
    )


def test_a_receipt_of_before_still_loads(pair):
    _, receipt = ask(pair, mode="fused")
    body = rapid_receipt(receipt)
    for name in ("tokens", "truncated"):
        del body["explain"][name]
    file = read_receipt(json.dumps({"request": {"temperature": 0.8}, "receipt": body}))
    assert file.receipt.explain is not None
