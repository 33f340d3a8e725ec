"""The contracts by enumeration: every branch of the code that runs, against the closed form.

Vocabularies are small enough to take every draft, every accept and every rejection in turn, so what
is compared are probabilities, in float64 and to 1e-12: no statistics, no seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
import pytest
import torch

from rapid.config import Rule, SamplingConfig, SpeculationConfig
from rapid.reference import Settings, keep, softmax
from rapid.speculation import draw
from rapid.speculation.fusion import fuse_probs
from rapid.speculation.loop import speculate
from rapid.speculation.noise import Purpose, uniforms
from rapid.speculation.sampling import filter_probs, proposal
from rapid.transfers import Transfer
from tests.branches import Branches, assert_same, branches
from tests.toy import ToyDrafter, ToyModel, ToyVerifier

__all__ = ["branches"]

TRANSFERS = get_args(Transfer)
FILTERS = [  # top_k, top_p, draft_top_k
    (None, 1.0, None), (None, 1.0, 2), (2, 1.0, 64), (None, 0.7, 3), (3, 0.8, 1),
]  # fmt: skip
INF = float("inf")
EDGES = {  # the target's logits, the drafter's
    "all tied": ([0, 0, 0], [0, 0, 0]),
    "two tied": ([1, 1, 0], [0, 2, 2]),
    "equal": ([1, 0, -1], [1, 0, -1]),
    "sure drafter": ([1, 0, -1], [0, 90, 0]),
    "sure target": ([0, 90, 0], [1, 0, -1]),
    "sure of different tokens": ([90, 0, 0], [0, 0, 90]),
    "impossible tokens": ([0, -INF, 1], [0, 1, -INF]),
    "one possible token": ([-INF, 0, -INF], [1, 0, -1]),
}


class Fixed(ToyModel):
    """The same logits after every prefix."""

    def __init__(self, logits: Sequence[float]) -> None:
        super().__init__("fixed", len(logits))
        self._logits = torch.tensor(logits, dtype=torch.float32)

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        return self._logits


def models(seed: int, vocab: int) -> tuple[ToyModel, ToyModel]:
    return ToyModel(f"target {seed}", vocab), ToyModel(f"drafter {seed}", vocab)


def draft_probs(drafter, prefix, sampling, speculation) -> np.ndarray:
    ids, probs = proposal(drafter.logits(prefix), draw.Draw(sampling, speculation, 0, 0))
    dense = np.zeros(drafter.vocab)
    dense[ids] = probs
    return dense / dense.sum()


def target_probs(target, prefix, sampling) -> np.ndarray:
    return keep(own_probs(target, prefix, sampling), settings_of(sampling))


def own_probs(model, prefix, sampling) -> np.ndarray:
    return softmax(model.logits(prefix).double().numpy(), settings_of(sampling))


def settings_of(sampling: SamplingConfig) -> Settings:
    names = ("temperature", "top_k", "top_p", "min_p")
    return Settings(**{name: getattr(sampling, name) for name in names})


def told_by_retrieval(drafter, witness, prefix, sampling, speculation) -> np.ndarray:
    """q, or its mean with the target's own reading of the retrieved text."""
    q = draft_probs(drafter, prefix, sampling, speculation)
    if witness is None:
        return q
    return (q + own_probs(witness, prefix, sampling)) / 2


def log_odds_after(target, drafter, text, sampling, speculation, witness=None) -> float:
    """Sum of 0.85^age * log(s / p) over `text`, p before filters, both at least 0.001."""
    told = 0.0
    for age, token in zip(reversed(range(len(text))), text, strict=True):
        before = text[: len(text) - age - 1]
        p = own_probs(target, before, sampling)[token]
        s = told_by_retrieval(drafter, witness, before, sampling, speculation)[token]
        told += 0.85**age * float(np.log(max(s, 1e-3)) - np.log(max(p, 1e-3)))
    return told


def promised(target, drafter, prefix, sampling, speculation, witness=None) -> np.ndarray:
    """What `fused` samples after `prefix`."""
    told = told_by_retrieval(drafter, witness, prefix, sampling, speculation)
    fused = fuse_probs(
        target.logits(prefix)[None],
        torch.from_numpy(told)[None],
        temperature=sampling.temperature,
        transfer=speculation.transfer,
        eta=speculation.eta,
        plausibility=speculation.plausibility,
        log_odds=log_odds_after(target, drafter, prefix, sampling, speculation, witness),
    )
    return filter_probs(fused, sampling.top_k, sampling.top_p, sampling.min_p)[0].numpy()


def texts(next_probs, num_tokens, eos_ids=(), prefix=()) -> Iterator[tuple[tuple, float]]:
    """Every text with its probability, token by token."""
    if len(prefix) == num_tokens or (prefix and prefix[-1] in eos_ids):
        yield prefix, 1.0
        return
    for token, chance in enumerate(next_probs(prefix)):
        for text, rest in texts(next_probs, num_tokens, eos_ids, (*prefix, token)):
            yield text, chance * rest


async def rounds(branches, target, drafter, sampling, speculation, num_drafted, witness=None):
    """The verdicts of one round as (tokens, accepted), with their probabilities."""
    chances: dict[tuple, float] = {}
    for _ in branches:
        block = ToyDrafter(drafter, sampling, speculation).block([], num_drafted)
        verifier = ToyVerifier(target, sampling, speculation, witness=witness)
        verdict = await verifier.verify(block)
        outcome = verdict.token_ids, verdict.num_accepted
        chances[outcome] = chances.get(outcome, 0.0) + branches.probability
    return chances


async def answers(
    branches, target, drafter, sampling, speculation, num_tokens, eos_ids=frozenset(), witness=None
):
    """The texts of the loop, with their probabilities; no drafter is plain decoding."""
    chances: dict[tuple, float] = {}
    for _ in branches:
        verifier = ToyVerifier(target, sampling, speculation, 0, eos_ids, num_tokens, witness)
        proposer = ToyDrafter(drafter, sampling, speculation) if drafter else None
        async for _ in speculate(
            proposer, verifier, max_tokens=num_tokens, max_draft=speculation.max_draft
        ):
            pass
        text = tuple(verifier.committed)
        chances[text] = chances.get(text, 0.0) + branches.probability
    return chances


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(("top_k", "top_p", "draft_top_k"), FILTERS)
async def test_a_position_follows_the_fused_distribution(
    branches: Branches, transfer, top_k, top_p, draft_top_k
):
    for vocab, eta, plausibility in itertools.product((3, 6), (0, 0.5, 5, 50), (0, 0.1, 1)):
        target, drafter = models(seed=vocab, vocab=vocab)
        sampling = SamplingConfig(top_k=top_k, top_p=top_p, temperature=0.7)
        speculation = SpeculationConfig(
            eta=eta, transfer=transfer, plausibility=plausibility, draft_top_k=draft_top_k
        )
        got = await rounds(branches, target, drafter, sampling, speculation, 1)
        want = promised(target, drafter, (), sampling, speculation)
        tokens = {token: sum(got.get(((token,), n), 0) for n in (0, 1)) for token in range(vocab)}
        assert_same(tokens, dict(enumerate(want)))


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(("min_p", "top_p"), [(0.2, 1), (0.5, 0.8), (1, 1)])
async def test_a_position_follows_it_without_what_min_p_drops(
    branches: Branches, transfer, min_p, top_p
):
    for vocab, eta in itertools.product((3, 6), (0, 0.5, 5)):
        target, drafter = models(seed=vocab, vocab=vocab)
        sampling = SamplingConfig(min_p=min_p, top_p=top_p, temperature=0.7)
        speculation = SpeculationConfig(eta=eta, transfer=transfer)
        got = await rounds(branches, target, drafter, sampling, speculation, 1)
        want = promised(target, drafter, (), sampling, speculation)
        tokens = {token: sum(got.get(((token,), n), 0) for n in (0, 1)) for token in range(vocab)}
        assert_same(tokens, dict(enumerate(want)))
        whole = sampling.model_copy(update={"min_p": 0.0, "top_p": 1.0})
        probs = promised(target, drafter, (), whole, speculation)
        kept = {token for token, prob in tokens.items() if prob > 0}
        assert kept <= {*np.flatnonzero(probs >= min_p * probs.max())}


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("edge", EDGES)
async def test_a_position_follows_it_at_the_edges(branches: Branches, transfer, edge):
    target, drafter = (Fixed(logits) for logits in EDGES[edge])
    for eta, plausibility, draft_top_k in itertools.product((0, 10, 50), (0, 1), (None, 1)):
        speculation = SpeculationConfig(
            eta=eta, transfer=transfer, plausibility=plausibility, draft_top_k=draft_top_k
        )
        sampling = SamplingConfig()
        got = await rounds(branches, target, drafter, sampling, speculation, 1)
        want = promised(target, drafter, (), sampling, speculation)
        tokens = {token: sum(got.get(((token,), n), 0) for n in (0, 1)) for token in range(3)}
        assert_same(tokens, dict(enumerate(want)))


@pytest.mark.parametrize("transfer", TRANSFERS)
async def test_every_outcome_of_a_round_has_the_probability_of_its_formula(
    branches: Branches, transfer
):
    """Kept are min(q, p_hat), position after position; the rest is made good once, and ends it."""
    sampling = SamplingConfig(temperature=0.8)
    for vocab, num_drafted, eta in ((3, 3, 10), (3, 2, 0), (4, 2, 50)):
        target, drafter = models(seed=1, vocab=vocab)
        speculation = SpeculationConfig(eta=eta, transfer=transfer, draft_top_k=None)
        want: dict[tuple, float] = {}
        reached = {(): 1.0}
        for position in range(num_drafted):
            longer = {}
            for prefix, chance in reached.items():
                draft = draft_probs(drafter, prefix, sampling, speculation)
                fused = promised(target, drafter, prefix, sampling, speculation)
                for token in range(vocab):
                    text = (*prefix, token)
                    longer[text] = chance * min(draft[token], fused[token])
                    want[text, position] = chance * max(fused[token] - draft[token], 0)
            reached = longer
        want |= {(text, num_drafted): chance for text, chance in reached.items()}
        got = await rounds(branches, target, drafter, sampling, speculation, num_drafted)
        assert_same(got, want)
        assert sum(got.values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("max_draft", [1, 2, 3])
@pytest.mark.parametrize("eos_ids", [frozenset(), frozenset({0})])
@pytest.mark.parametrize("transfer", TRANSFERS)
async def test_chains_of_rounds_follow_the_fused_distribution(
    branches: Branches, transfer, max_draft, eos_ids
):
    target, drafter = models(seed=2, vocab=3)
    sampling = SamplingConfig(temperature=0.9)
    speculation = SpeculationConfig(
        eta=10, transfer=transfer, max_draft=max_draft, draft_top_k=None
    )
    got = await answers(branches, target, drafter, sampling, speculation, 3, eos_ids)
    next_probs = lambda prefix: promised(target, drafter, prefix, sampling, speculation)  # noqa: E731
    assert_same(got, dict(texts(next_probs, 3, eos_ids)))


@pytest.mark.parametrize(("top_k", "top_p", "draft_top_k"), FILTERS)
async def test_with_the_targets_own_reading_a_position_follows_the_mixture_of_three(
    branches: Branches, top_k, top_p, draft_top_k
):
    for vocab, eta, plausibility in itertools.product((3, 6), (0, 0.5, 5, 50), (0, 0.1, 1)):
        target, drafter = models(seed=vocab, vocab=vocab)
        witness = ToyModel("witness", vocab)
        sampling = SamplingConfig(top_k=top_k, top_p=top_p, temperature=0.7)
        speculation = SpeculationConfig(
            eta=eta, transfer="adaptive", plausibility=plausibility, draft_top_k=draft_top_k
        )
        got = await rounds(branches, target, drafter, sampling, speculation, 1, witness)
        want = promised(target, drafter, (), sampling, speculation, witness)
        tokens = {token: sum(got.get(((token,), n), 0) for n in (0, 1)) for token in range(vocab)}
        assert_same(tokens, dict(enumerate(want)))


@pytest.mark.parametrize("max_draft", [1, 2, 3])
@pytest.mark.parametrize("eos_ids", [frozenset(), frozenset({0})])
async def test_chains_of_rounds_follow_the_mixture_of_three(branches: Branches, max_draft, eos_ids):
    target, drafter = models(seed=2, vocab=3)
    witness = ToyModel("witness 2", 3)
    sampling = SamplingConfig(temperature=0.9)
    speculation = SpeculationConfig(transfer="adaptive", max_draft=max_draft, draft_top_k=None)
    got = await answers(branches, target, drafter, sampling, speculation, 3, eos_ids, witness)
    next_probs = lambda prefix: promised(target, drafter, prefix, sampling, speculation, witness)  # noqa: E731
    assert_same(got, dict(texts(next_probs, 3, eos_ids)))
    without = await answers(branches, target, drafter, sampling, speculation, 3, eos_ids)
    assert max(abs(got[text] - without[text]) for text in got) > 1e-3


async def test_other_transfers_do_not_listen_to_the_targets_own_reading(branches: Branches):
    target, drafter = models(seed=2, vocab=3)
    sampling = SamplingConfig()
    for transfer in ("boost", "distill"):
        speculation = SpeculationConfig(transfer=transfer)
        got = await rounds(branches, target, drafter, sampling, speculation, 2, ToyModel("w", 3))
        assert got == await rounds(branches, target, drafter, sampling, speculation, 2)


@pytest.mark.parametrize(("top_k", "top_p", "draft_top_k"), FILTERS)
async def test_plain_and_lossless_follow_the_target(branches: Branches, top_k, top_p, draft_top_k):
    target, drafter = models(seed=3, vocab=4)
    sampling = SamplingConfig(temperature=0.9, top_k=top_k, top_p=top_p)
    want = dict(texts(lambda prefix: target_probs(target, prefix, sampling), 2, {0}))
    for each, max_draft in ((None, 3), (drafter, 1), (drafter, 2)):
        speculation = SpeculationConfig(eta=0, max_draft=max_draft, draft_top_k=draft_top_k)
        got = await answers(branches, target, each, sampling, speculation, 2, frozenset({0}))
        assert_same(got, want)


@pytest.mark.parametrize("rule", get_args(Rule))
async def test_no_number_decides_two_things(rule, monkeypatch):
    """What enumeration takes for granted: the decisions of an answer are independent."""
    target, drafter = models(seed=5, vocab=4)
    keys: list[tuple] = []

    def recorded(seed, choice, position, purpose, count):
        keys.append((seed, choice, position, purpose))
        return uniforms(seed, choice, position, purpose, count)

    monkeypatch.setattr(draw, "uniforms", recorded)
    for seed in range(10):
        sampling, speculation = SamplingConfig(seed=seed), SpeculationConfig(rule=rule, eta=5)
        verifier = ToyVerifier(target, sampling, speculation)
        proposer = ToyDrafter(drafter, sampling, speculation)
        async for _ in speculate(proposer, verifier, max_tokens=40, max_draft=4):
            pass
    # A position behind a rejection is drafted again; what was drafted there before decided nothing.
    judged = [key for key in keys if key[-1] != Purpose.DRAFT]
    bonus = {Purpose.RESULT} if rule == "paper" else set()
    assert {key[-1] for key in judged} == {Purpose.ACCEPT, Purpose.RESIDUAL} | bonus
    assert len(judged) == len(set(judged))
