"""The rule against its closed form, by enumeration: no statistics, no tolerance but rounding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.speculation.acceptance import acceptance_probs, residual
from rapid.speculation.fusion import fused_probs
from rapid.speculation.sampling import filter_probs, probabilities, proposal

ETAS = (0.0, 0.5, 2.0, 10.0, 50.0)


def outcome(fused: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """The distribution of the committed token, summed over every draft and every accept."""
    accepted = draft * acceptance_probs(fused, draft)
    return accepted + (1 - accepted.sum()) * residual(fused, draft)


def dense(logits: torch.Tensor, sampling: SamplingConfig, speculation: SpeculationConfig):
    ids, probs = proposal(logits, sampling, speculation)
    row = np.zeros(len(logits))
    row[ids] = probs
    return row


def case(seed: int, vocab: int):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(2, vocab, generator=generator)


@pytest.mark.parametrize("transfer", ["distill", "boost"])
@pytest.mark.parametrize(("top_k", "top_p", "draft_top_k"), [
    (None, 1.0, None), (None, 1.0, 2), (2, 1.0, 64), (None, 0.7, 3), (3, 0.8, 1),
])  # fmt: skip
def test_a_position_follows_the_fused_distribution_exactly(transfer, top_k, top_p, draft_top_k):
    for seed, vocab, eta, plausibility in itertools.product(range(6), (3, 6), ETAS, (0, 0.1, 1)):
        target, drafter = case(seed, vocab)
        sampling = SamplingConfig(top_k=top_k, top_p=top_p)
        speculation = SpeculationConfig(draft_top_k=draft_top_k)
        draft = dense(drafter, sampling, speculation)
        fused = fused_probs(
            target[None],
            torch.from_numpy(draft)[None],
            temperature=1.0,
            transfer=transfer,
            eta=eta,
            plausibility=plausibility,
        )
        fused = filter_probs(fused, top_k, top_p)[0].numpy()
        # float32 proposals sum to one within 1e-7; the rule is exact for the proposal as sent
        draft = draft / draft.sum()
        np.testing.assert_allclose(outcome(fused, draft), fused, atol=1e-12)


def test_two_positions_follow_the_chain_of_fused_distributions():
    vocab, speculation = 3, SpeculationConfig(draft_top_k=None)
    rows = {(): case(1, vocab), **{(x,): case(2 + x, vocab) for x in range(vocab)}}

    def distributions(prefix):
        target, drafter = rows[prefix]
        draft = probabilities(drafter, 1.0)
        fused = fused_probs(
            target[None],
            draft[None],
            temperature=1.0,
            transfer="distill",
            eta=10.0,
            plausibility=0.1,
        )
        return fused[0].numpy(), draft.numpy()

    fused, draft = distributions(())
    accept, corrected = draft * acceptance_probs(fused, draft), residual(fused, draft)
    committed = np.zeros((vocab, vocab))
    for first in range(vocab):
        second_fused, second_draft = distributions((first,))
        # Kept: the same block's second position is judged. Rejected: a new block starts after it.
        # Either way the second token is offered by q and settled against p_hat of its own prefix.
        second = outcome(second_fused, second_draft)
        committed[first] = (accept[first] + (1 - accept.sum()) * corrected[first]) * second
    want = np.stack([fused[x] * distributions((x,))[0] for x in range(vocab)])
    np.testing.assert_allclose(committed, want, atol=1e-12)
    assert speculation.draft_top_k is None


def test_eta_zero_is_the_target_bit_for_bit():
    target, drafter = case(3, 6)
    draft = probabilities(drafter, 1.0)
    for transfer in ("distill", "boost"):
        fused = fused_probs(
            target, draft, temperature=0.7, transfer=transfer, eta=0, plausibility=0.1
        )
        assert torch.equal(fused, probabilities(target, 0.7))


def test_boost_never_lowers_a_token_more_than_normalisation_does():
    target, drafter = case(4, 6)
    draft = probabilities(drafter, 1.0)
    p = probabilities(target, 1.0)
    boosted = fused_probs(target, draft, temperature=1.0, transfer="boost", eta=10, plausibility=0)
    raised = draft > p
    gain = boosted / p
    assert gain[raised].min() > gain[~raised].max()
    torch.testing.assert_close(gain[~raised], gain[~raised][:1].expand_as(gain[~raised]))


def test_the_fused_distribution_by_hand():
    z, q = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.75]])
    p = torch.softmax(z.double(), -1)
    move = q.double() - p
    want = torch.softmax(z.double() + 4 * move, -1)
    got = fused_probs(z, q, temperature=1.0, transfer="distill", eta=4, plausibility=0)
    torch.testing.assert_close(got, want)
    only_second = fused_probs(z, q, temperature=1.0, transfer="distill", eta=4, plausibility=0.5)
    want = torch.softmax(z.double() + 4 * move * torch.tensor([[0.0, 1.0]]), -1)
    torch.testing.assert_close(only_second, want)


def test_a_residual_without_mass_is_the_fused_distribution():
    p = np.array([0.2, 0.3, 0.5])
    np.testing.assert_array_equal(residual(p, p), p)


def test_one_hot_drafts_lose_nothing():
    fused, draft = np.array([0.2, 0.3, 0.5]), np.array([0.0, 1.0, 0.0])
    np.testing.assert_allclose(outcome(fused, draft), fused, atol=1e-15)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30), min_size=1, max_size=8),
    top_k=st.one_of(st.none(), st.integers(1, 9)),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.05, 2.0),
)
def test_filters_keep_a_distribution_with_its_best_token(logits, top_k, top_p, temperature):
    probs = probabilities(torch.tensor(logits), temperature)
    kept = filter_probs(probs, top_k, top_p)
    assert kept.isfinite().all()
    assert abs(float(kept.sum()) - 1) < 1e-12
    assert kept[probs.argmax()] > 0
    assert int((kept > 0).sum()) <= (top_k or len(logits))
    ids, q = proposal(
        torch.tensor(logits),
        SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p),
        SpeculationConfig(draft_top_k=3),
    )
    assert 1 <= len(ids) <= 3
    assert abs(q.sum() - 1) < 1e-6


def test_top_p_keeps_the_smallest_set_that_holds_it():
    probs = torch.tensor([0.1, 0.5, 0.25, 0.15], dtype=torch.float64)
    kept = filter_probs(probs, None, 0.7)
    torch.testing.assert_close(kept, torch.tensor([0, 2 / 3, 1 / 3, 0], dtype=torch.float64))
