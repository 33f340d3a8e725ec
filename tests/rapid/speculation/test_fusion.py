"""The fused distribution by hand and at its edges (proofs: `test_rule_proofs`)."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from rapid.speculation.fusion import fuse_probs, update_log_odds, weigh_retrieved
from rapid.speculation.sampling import probabilities
from rapid.transfers import Transfer


def case(seed: int, vocab: int):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(2, vocab, generator=generator)


def test_eta_zero_is_the_target_bit_for_bit():
    target, drafter = case(3, 6)
    draft = probabilities(drafter, 1.0)
    for transfer in get_args(Transfer):
        fused = fuse_probs(
            target, draft, temperature=0.7, transfer=transfer, eta=0, plausibility=0.1
        )
        assert torch.equal(fused, probabilities(target, 0.7))


def test_boost_never_lowers_a_token_more_than_normalisation_does():
    target, drafter = case(4, 6)
    draft = probabilities(drafter, 1.0)
    p = probabilities(target, 1.0)
    boosted = fuse_probs(target, draft, temperature=1.0, transfer="boost", eta=10, plausibility=0)
    raised = draft > p
    gain = boosted / p
    assert gain[raised].min() > gain[~raised].max()
    torch.testing.assert_close(gain[~raised], gain[~raised][:1].expand_as(gain[~raised]))


def test_the_fused_distribution_by_hand():
    z, q = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.75]])
    p = torch.softmax(z.double(), -1)
    move = q.double() - p
    want = torch.softmax(z.double() + 4 * move, -1)
    got = fuse_probs(z, q, temperature=1.0, transfer="distill", eta=4, plausibility=0)
    torch.testing.assert_close(got, want)
    only_second = fuse_probs(z, q, temperature=1.0, transfer="distill", eta=4, plausibility=0.5)
    want = torch.softmax(z.double() + 4 * move * torch.tensor([[0.0, 1.0]]), -1)
    torch.testing.assert_close(only_second, want)


def test_a_mixture_is_the_weighted_mean_of_both_distributions_by_hand():
    z, q = torch.log(torch.tensor([[0.5, 0.5, 0.0]])), torch.tensor([[0.1, 0.0, 0.9]])

    def mixed(eta, plausibility):
        return fuse_probs(
            z, q, temperature=1.0, transfer="mixture", eta=eta, plausibility=plausibility
        )[0].tolist()

    for plausibility in (0.0, 0.5):  # what the drafter finds unlikely counts as well
        assert mixed(1.0, plausibility) == pytest.approx([0.3, 0.25, 0.45])
        assert mixed(3.0, plausibility) == pytest.approx([0.2, 0.125, 0.675])


def adapted(target, draft, eta: float, log_odds: float = 0.0, plausibility: float = 0.0):
    return fuse_probs(
        target,
        draft,
        temperature=1.0,
        transfer="adaptive",
        eta=eta,
        plausibility=plausibility,
        log_odds=log_odds,
    )


def test_the_adaptive_mixture_by_hand():
    z, q = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.05, 0.7, 0.25]])
    p = torch.softmax(z.double(), -1)
    odds = 0.999 * 3**0.4
    weight = odds / (1 + odds)
    mixed = (1 - weight) * p + weight * q.double()
    want = mixed * torch.exp(10 * weight * mixed)
    got = adapted(z, q, 10, math.log(3))
    torch.testing.assert_close(got, want / want.sum())
    mixed = (1 - weight) * p + weight * q.double() * torch.tensor([[0.0, 1.0, 1.0]])
    want = mixed * torch.exp(10 * weight * mixed)
    got = adapted(z, q, 10, math.log(3), plausibility=0.1)
    torch.testing.assert_close(got, want / want.sum())


def test_whoever_foretold_the_text_decides_where_two_sure_readings_differ():
    z, q = torch.tensor([[8.0, 0.0]]), torch.tensor([[0.001, 0.999]])
    drafter_knew = update_log_odds(0.0, target_prob=0.1, draft_prob=0.9)
    target_knew = update_log_odds(0.0, target_prob=0.9, draft_prob=0.1)
    assert adapted(z, q, 10, drafter_knew).argmax() == 1
    assert adapted(z, q, 10, target_knew).argmax() == 0


def test_of_two_readings_that_are_equally_sure_to_one_in_a_thousand_the_document_wins():
    z = torch.tensor([[8.0, 0.0]])  # 0.99966
    for sure, best in ((1.0, 0), (0.9999, 0), (0.999, 0)):
        assert adapted(z, torch.tensor([[1 - sure, sure]]), 10).argmax() == best
    doubtful = torch.tensor([[6.0, 0.0]])  # 0.9975
    assert adapted(doubtful, torch.tensor([[0.0005, 0.9995]]), 10).argmax() == 1


def test_eta_sharpens_the_mixture_and_never_changes_its_best_token():
    target, drafter = case(4, 6)
    draft = probabilities(drafter, 1.0)
    for log_odds in (-3.0, 0.0, 3.0):
        soft, sharp = (adapted(target, draft, eta, log_odds) for eta in (1, 20))
        assert torch.equal(soft.argmax(-1), sharp.argmax(-1))
        assert (sharp.amax(-1) > soft.amax(-1)).all()


def test_the_weight_is_bounded_and_what_was_foretold_is_forgotten():
    sure = update_log_odds(0.0, target_prob=0.0, draft_prob=1.0)
    assert sure == pytest.approx(math.log(1000))  # whatever is less likely than 0.001
    assert update_log_odds(sure, target_prob=0.5, draft_prob=0.5) == pytest.approx(0.85 * sure)
    most = sure / 0.15  # the sum of 0.85^i times it
    assert 0 < weigh_retrieved(-most) < 1e-7
    assert 1 - 1e-7 < weigh_retrieved(most) < 1
