"""The fused distribution by hand and at its edges (proofs: `test_rule_proofs`)."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from rapid.config import Transfer
from rapid.speculation.fusion import adapted_eta, fused_probs, observed
from rapid.speculation.sampling import probabilities


def case(seed: int, vocab: int):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(2, vocab, generator=generator)


def test_eta_zero_is_the_target_bit_for_bit():
    target, drafter = case(3, 6)
    draft = probabilities(drafter, 1.0)
    for transfer in get_args(Transfer):
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


def test_a_mixture_is_the_weighted_mean_of_both_distributions_by_hand():
    z, q = torch.log(torch.tensor([[0.5, 0.5, 0.0]])), torch.tensor([[0.1, 0.0, 0.9]])

    def mixed(eta, plausibility):
        return fused_probs(
            z, q, temperature=1.0, transfer="mixture", eta=eta, plausibility=plausibility
        )[0].tolist()

    for plausibility in (0.0, 0.5):  # what the drafter finds unlikely counts as well
        assert mixed(1.0, plausibility) == pytest.approx([0.3, 0.25, 0.45])
        assert mixed(3.0, plausibility) == pytest.approx([0.2, 0.125, 0.675])


def test_the_strength_follows_which_reader_foretold_the_text():
    target, drafter = case(4, 6)
    draft = probabilities(drafter, 1.0)

    def fused(transfer, eta, log_odds=0.0):
        return fused_probs(
            target,
            draft,
            temperature=1.0,
            transfer=transfer,
            eta=eta,
            plausibility=0.1,
            log_odds=log_odds,
        )

    torch.testing.assert_close(fused("adaptive", 8), fused("boost", 8))
    drafter_knew = observed(0.0, target_prob=0.1, draft_prob=0.9)
    target_knew = observed(0.0, target_prob=0.9, draft_prob=0.1)
    strength = 8 * 9**0.3
    torch.testing.assert_close(fused("adaptive", 8, drafter_knew), fused("boost", strength))
    torch.testing.assert_close(fused("adaptive", 8, target_knew), fused("boost", 8 / 9**0.3))
    assert torch.equal(fused("boost", 8, drafter_knew), fused("boost", 8))


def test_the_strength_is_bounded_and_what_was_foretold_is_forgotten():
    assert adapted_eta(8, 60.0) == pytest.approx(32)
    assert adapted_eta(8, -60.0) < 1e-6
    sure = observed(0.0, target_prob=0.0, draft_prob=1.0)
    assert sure == pytest.approx(math.log(1000))  # whatever is less likely than 0.001
    assert observed(sure, target_prob=0.5, draft_prob=0.5) == pytest.approx(0.9 * sure)
