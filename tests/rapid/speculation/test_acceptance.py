"""Distributions: by hand, at their edges, and for arbitrary logits (proofs: `test_rule_proofs`)."""

from __future__ import annotations

from typing import get_args

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.speculation.acceptance import acceptance_probability, residual
from rapid.speculation.draw import Draw
from rapid.speculation.fusion import fuse_probs
from rapid.speculation.sampling import filter_probs, probabilities, proposal
from rapid.transfers import Transfer


def test_a_residual_without_mass_is_the_fused_distribution():
    p = np.array([0.2, 0.3, 0.5])
    np.testing.assert_array_equal(residual(p, p), p)


def test_what_the_drafter_likes_too_much_is_accepted_by_its_share():
    assert acceptance_probability(0.2, 0.8) == 0.25
    assert acceptance_probability(0.8, 0.2) == 1
    assert acceptance_probability(0.0, 0.5) == 0
    assert acceptance_probability(0.0, 0.0) == 1  # never offered


LOGIT = st.one_of(st.floats(-30, 30), st.sampled_from([0.0, 1e30, -1e30, -float("inf")]))


def is_possible(logits):
    return max(logits) > -float("inf")


LOGITS = st.lists(LOGIT, min_size=1, max_size=8).filter(is_possible)
PAIRS = st.lists(st.tuples(LOGIT, LOGIT), min_size=1, max_size=8).filter(
    lambda pairs: all(map(is_possible, zip(*pairs, strict=True)))
)


@settings(max_examples=200)
@given(
    logits=LOGITS,
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
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    draw = Draw(sampling, SpeculationConfig(draft_top_k=3), 0, 0)
    ids, q = proposal(torch.tensor(logits), draw)
    assert 1 <= len(ids) <= 3
    assert abs(q.sum() - 1) < 1e-6


@settings(max_examples=200)
@given(
    pairs=PAIRS,
    transfer=st.sampled_from(get_args(Transfer)),
    eta=st.one_of(st.sampled_from([0.0, 1000.0]), st.floats(0, 50)),
    plausibility=st.floats(0, 1),
    temperature=st.floats(0.05, 2.0),
)
def test_what_is_fused_and_what_a_rejection_draws_from_are_distributions(
    pairs, transfer, eta, plausibility, temperature
):
    target, drafter = torch.tensor(pairs).T
    draft = probabilities(drafter, temperature)
    fused = fuse_probs(
        target[None],
        draft[None],
        temperature=temperature,
        transfer=transfer,
        eta=eta,
        plausibility=plausibility,
    )[0].numpy()
    kept = np.minimum(draft.numpy(), fused)
    target_probs = probabilities(target, temperature).numpy()
    for probs in (fused, residual(fused, draft.numpy()), residual(target_probs, kept)):
        assert np.isfinite(probs).all()
        assert (probs >= 0).all()
        assert abs(probs.sum() - 1) < 1e-12


def test_top_p_keeps_the_smallest_set_that_holds_it():
    probs = torch.tensor([0.1, 0.5, 0.25, 0.15], dtype=torch.float64)
    kept = filter_probs(probs, None, 0.7)
    torch.testing.assert_close(kept, torch.tensor([0, 2 / 3, 1 / 3, 0], dtype=torch.float64))
