"""How likely committed tokens were: p, q and p_hat of every way to judge, as they are defined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rapid import reference
from rapid.config import Coupling, SamplingConfig, SpeculationConfig
from rapid.receipt import TokenProbs
from rapid.speculation import acceptance, questions
from rapid.speculation.acceptance import Judgement
from rapid.speculation.draw import Draw
from rapid.speculation.fast import contenders, rows
from rapid.speculation.fast.step import answer_questions, answer_together
from rapid.speculation.questions import Decoded, ToDecode, ToJudge
from rapid.transfers import Transfer
from tests.rapid.speculation.drafted import blocks

WAYS = {
    "by the specification": lambda asked: [each.by_specification() for each in asked],
    "one by one": answer_questions,
    "together": answer_together,
}
SETTINGS = [
    *((each, False, how) for each in get_args(Transfer) for how in get_args(Coupling)),
    *(("adaptive", True, coupling) for coupling in get_args(Coupling)),
]


@pytest.fixture(autouse=True)
def vocabularies_count_as_long(monkeypatch) -> None:
    monkeypatch.setattr("rapid.speculation.fast.step._LONG", 0)


def asked(transfer, coupling, temperature, eta=5.0, *, is_witnessed=False, **more: Any):
    """Return blocks whose judgements say how likely their tokens were."""
    speculation = SpeculationConfig(transfer=transfer, eta=eta, coupling=coupling, **more)
    draws = [
        Draw(SamplingConfig(seed=seed, temperature=temperature, top_p=top_p), speculation, 0, seed)
        for seed, top_p in enumerate([1.0, 1.0, 1.0, 0.8, 0.8, 0.8])
    ]
    made = blocks(
        np.random.default_rng(3), draws, 700, is_witnessed=is_witnessed, rounds_to=torch.float32
    )
    return [replace(question, explains=True) for question in made]


def define(question: ToJudge, token_ids: Sequence[int]) -> Iterator[TokenProbs]:
    """Yield p, q and p_hat of tokens, by whole rows of `rapid.reference`."""
    speculation, draw, odds = question.draw.speculation, question.draw, question.log_odds
    settings: Any = SimpleNamespace(
        temperature=draw.sampling.temperature, eta=speculation.eta, transfer=speculation.transfer,
        transfer_temperature=speculation.transfer_temperature, top_k=None, min_p=0.0,
        plausibility=speculation.plausibility, top_p=draw.sampling.top_p,
    )  # fmt: skip
    block, logits = question.block, question.logits.double().numpy()
    for row, token in enumerate(token_ids):
        target = reference.softmax(logits[row], settings)
        if row == len(block):
            yield TokenProbs(target[token], None, target[token])
            return
        q, ids = np.zeros(len(target)), block.candidate_ids[row]
        q[ids[ids >= 0]] = block.candidate_probs[row][ids >= 0]
        q /= q.sum()
        told = q
        if question.witness is not None:
            told = (q + reference.softmax(question.witness[row].double().numpy(), settings)) / 2
        of_fusion = logits[row]
        if speculation.rule == "paper":
            of_fusion = np.where(reference.keep(target, settings) > 0, of_fusion, -np.inf)
        fused = reference.fuse(of_fusion, told, settings, odds)
        yield TokenProbs(target[token], q[token], fused[token])
        odds = 0.85 * odds + np.log(max(told[token], 1e-3) / max(target[token], 1e-3))


def check(question: ToJudge, judgement: Judgement) -> None:
    expected = [*define(question, judgement.token_ids)]
    assert len(judgement.probs) == len(judgement.token_ids)
    for told, defined in zip(judgement.probs, expected, strict=True):
        assert told.target == pytest.approx(defined.target, rel=1e-6, abs=1e-7)
        assert told.sampled == pytest.approx(defined.sampled, rel=1e-5, abs=1e-7)
        if defined.drafter is None:
            assert told.drafter is None
        else:
            assert told.drafter == pytest.approx(defined.drafter, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("transfer", "is_witnessed", "coupling"), SETTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_judge_tells_p_q_and_p_hat(way, transfer, is_witnessed, coupling, temperature):
    questions = asked(transfer, coupling, temperature, is_witnessed=is_witnessed)
    if way == "together":
        questions = questions[1:4]  # an interpreter runs the kernels
    for question, judgement in zip(questions, WAYS[way](questions), strict=True):
        check(question, judgement)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_fused_follows_the_target(way, temperature):
    questions = asked("adaptive", "shared_noise", temperature, eta=0)[:3]
    for question, judgement in zip(questions, WAYS[way](questions), strict=True):
        check(question, judgement)
        assert all(told.sampled == pytest.approx(told.target) for told in judgement.probs)


def test_the_rule_of_the_paper_tells_what_its_drafts_are_judged_by():
    for question in asked("distill", "maximal", 0.7, rule="paper"):
        one_more = torch.cat([question.logits, question.logits[:1]])  # for the bonus token
        asking = replace(question, logits=one_more)
        check(asking, asking.by_specification())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("way", WAYS)
def test_a_token_that_the_target_writes_alone_has_its_own_probability(way, temperature):
    (question, *_) = asked("adaptive", "shared_noise", temperature)
    decoding = ToDecode(question.logits[0], question.draw, explains=True)
    empty = replace(
        question,
        block=replace(
            question.block,
            token_ids=question.block.token_ids[:0],
            candidate_ids=question.block.candidate_ids[:0],
            candidate_probs=question.block.candidate_probs[:0],
        ),
        logits=question.logits[:1],
    )
    decoded, judged = WAYS[way]([decoding, empty])
    assert isinstance(decoded, Decoded)
    probs = torch.softmax(question.logits[0].double() / (temperature or 1), -1)
    for token, told in ((decoded.token, decoded.probs), (judged.token_ids[0], judged.probs[0])):
        expected = float(probs[token])
        assert (told.target, told.drafter) == (pytest.approx(expected, rel=1e-6), None)
        assert told.sampled == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_computed_that_was_not_asked_for(way, monkeypatch):
    computed = []
    monkeypatch.setattr(
        acceptance._Distributions, "of", lambda *_: computed.append("a judged token")
    )
    monkeypatch.setattr(questions, "own_probs", lambda *_: computed.append("a plain token"))
    monkeypatch.setattr(rows.Fused, "prob", lambda *_: computed.append("a fused one"))
    monkeypatch.setattr("rapid.speculation.fast.step.own_prob", lambda *_: computed.append("one"))
    made = [replace(each, explains=False) for each in asked("adaptive", "maximal", 0.7)[:3]]
    answers = WAYS[way]([*made, ToDecode(made[0].logits[0], made[0].draw)])
    assert not computed
    assert [each.probs for each in answers] == [(), (), (), None]


def test_a_long_flat_tail_is_summed_to_a_millionth():
    """Where the fused distribution's sum is bounded and not computed token by token."""
    (question, *_) = asked("adaptive", "shared_noise", 1.0, eta=10.0)
    logits = torch.randn(151_936, generator=torch.Generator().manual_seed(1)) * 2
    ids = np.argsort(-logits.numpy())[:64].astype(np.int64).copy()
    draft = np.full(64, 1 / 64)
    outcome = contenders.decide(logits, ids, draft, int(ids[0]), question.draw, 0.0, explains=True)
    (told,) = outcome.probs
    settings: Any = SimpleNamespace(
        temperature=1.0, eta=10.0, transfer="adaptive", plausibility=0.1, transfer_temperature=1.0
    )
    whole = np.zeros(len(logits))
    whole[ids] = draft
    fused = reference.fuse(logits.double().numpy(), whole, settings, 0.0)
    assert told.sampled == pytest.approx(fused[outcome.token], rel=2e-6)
