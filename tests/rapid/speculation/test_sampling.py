"""What tokens are drawn from: filters, the drafter's proposal, and what log-probabilities tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.messages import DraftBlock, TokenLogprobs
from rapid.speculation.acceptance import decode_token, judge
from rapid.speculation.draw import Draw
from rapid.speculation.fusion import fuse_probs
from rapid.speculation.sampling import filter_probs, probabilities, proposal

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 1.0])
NARROW = SamplingConfig(top_k=3, top_p=0.7, seed=2)


def distribution(*probs: float) -> torch.Tensor:
    return torch.tensor(probs, dtype=torch.float64)


def sure_block(token: int) -> DraftBlock:
    """One drafted token that its drafter was sure of."""
    ids = np.array([token], dtype=np.int32)
    return DraftBlock("a", 0, 0, ids, ids[:, None], np.ones((1, 1), np.float32))


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    """0.4 of all is less than a half; of what two tokens have, it is more."""
    kept = filter_probs(distribution(0.4, 0.3, 0.2, 0.1), 2, 0.5)
    torch.testing.assert_close(kept, distribution(1, 0, 0, 0))


def test_a_set_that_holds_exactly_top_p_needs_no_further_token() -> None:
    kept = filter_probs(distribution(0.5, 0.25, 0.125, 0.125), None, 0.75)
    torch.testing.assert_close(kept, distribution(2 / 3, 1 / 3, 0, 0))


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (None, 0.6), (3, 0.7)])
@pytest.mark.parametrize("draft_top_k", [None, 4])
def test_a_drafter_keeps_to_the_filters_of_the_request(
    top_k: int | None, top_p: float, draft_top_k: int | None
) -> None:
    sampling = SamplingConfig(top_k=top_k, top_p=top_p)
    draw = Draw(sampling, SpeculationConfig(draft_top_k=draft_top_k), 0, 0)
    ids, probs = proposal(LOGITS, draw)
    wanted = filter_probs(probabilities(LOGITS, 1.0), top_k, top_p)
    assert sorted(ids.tolist()) == wanted.nonzero()[:, 0].tolist()  # nothing impossible is sent
    np.testing.assert_allclose(probs, wanted[ids.tolist()], rtol=1e-6)
    assert len(ids) < 4


def test_greedy_requests_propose_at_the_transfer_temperature() -> None:
    speculation = SpeculationConfig(transfer_temperature=0.5, draft_top_k=None)
    _, probs = proposal(LOGITS, Draw(SamplingConfig(temperature=0), speculation, 0, 0))
    np.testing.assert_allclose(probs, probabilities(LOGITS, 0.5), rtol=1e-6)


def test_greedy_requests_fuse_at_the_transfer_temperature() -> None:
    """The drafter's move is weighed against sharper logits: here they win, else it does."""
    block, won = sure_block(3), {}
    for temperature in (0.125, 1.0):
        speculation = SpeculationConfig(eta=2.0, transfer="boost", transfer_temperature=temperature)
        draw = Draw(SamplingConfig(temperature=0), speculation, 0, 0)
        judgement = judge(block, LOGITS[None], draw, frozenset())
        fused = fuse_probs(
            LOGITS[None],
            distribution(0, 0, 0, 1, 0)[None],
            temperature=temperature,
            transfer=speculation.transfer,
            eta=2.0,
            plausibility=speculation.plausibility,
        )
        assert judgement.token_ids == (int(fused.argmax()),)
        won[temperature] = judgement.token_ids[0]
    assert won == {0.125: 1, 1.0: 3}


def test_only_a_witnessed_block_is_weighed_for_the_odds() -> None:
    block = sure_block(3)
    for eta, is_weighed in ((0.0, False), (2.0, True)):
        draw = Draw(SamplingConfig(temperature=0), SpeculationConfig(eta=eta), 0, 0)
        assert (judge(block, LOGITS[None], draw, frozenset()).log_odds != 0) == is_weighed


def assert_unfiltered(entry: TokenLogprobs | None, probs: torch.Tensor) -> None:
    """`entry` describes these probabilities, with an alternative that the filters forbid."""
    assert entry is not None
    logprobs = probs.log()
    assert entry.logprob == pytest.approx(float(logprobs[entry.token_id]))
    assert dict(entry.top) == pytest.approx(dict(enumerate(logprobs.tolist())))


def test_log_probabilities_of_plain_decoding_are_those_before_filters() -> None:
    _, entry = decode_token(LOGITS, Draw(NARROW, SpeculationConfig(), 0, 0), num_logprobs=5)
    assert_unfiltered(entry, probabilities(LOGITS, 1.0))


@pytest.mark.parametrize("coupling", ["maximal", "shared_noise"])
def test_log_probabilities_of_a_judged_token_are_those_before_filters(coupling: str) -> None:
    speculation = SpeculationConfig(eta=0.0, coupling=coupling)
    draw = Draw(NARROW, speculation, 0, 0)
    judgement = judge(sure_block(1), LOGITS[None], draw, frozenset(), 5)
    assert_unfiltered(judgement.logprobs[0], probabilities(LOGITS, 1.0))
