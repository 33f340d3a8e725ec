"""Functions from logits to the distributions that tokens are drawn from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from rapid.errors import EngineFailed
from rapid.messages import Float32Array, Int32Array
from rapid.speculation.noise import NOT_NUMBERS

if TYPE_CHECKING:
    from rapid.speculation.draw import Draw


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return ``softmax(logits / temperature)`` in float64, over the last axis."""
    scaled = logits.double()
    if temperature != 1:  # dividing by one changes no bit, and takes a third of the time
        scaled = scaled / temperature
    return torch.softmax(scaled, dim=-1)


def best_token(scores: torch.Tensor) -> int:
    """Return the token with the highest logit or probability [vocab]; ties go to the lowest id.

    Raises:
        EngineFailed: The highest score is infinite or NaN; NaN counts as higher than any number.
    """
    token = int(scores.argmax())
    if not math.isfinite(scores[token]):
        raise EngineFailed(NOT_NUMBERS)
    return token


def filter_probs(
    probs: torch.Tensor, top_k: int | None, top_p: float, min_p: float = 0.0
) -> torch.Tensor:
    """Keep the `top_k` best tokens, then the fewest with total mass `top_p`, and renormalise.

    Before that, tokens below `min_p` times the best one's probability are dropped. Of equal tokens
    [..., vocab] the lower id is kept. The best one always survives.
    """
    vocab = probs.shape[-1]
    if min_p > 0:
        probs = probs * (probs >= min_p * probs.amax(dim=-1, keepdim=True))
        probs = probs / probs.sum(dim=-1, keepdim=True)
    if (top_k is None or top_k >= vocab) and top_p >= 1:
        return probs
    best, order = probs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        best[..., top_k:] = 0
    best = best / best.sum(dim=-1, keepdim=True)
    best[best.cumsum(dim=-1) - best >= top_p] = 0
    kept = torch.zeros_like(probs).scatter_(-1, order, best)
    return kept / kept.sum(dim=-1, keepdim=True)


def proposal(logits: torch.Tensor, draw: Draw) -> tuple[Int32Array, Float32Array]:
    """Return the drafter's distribution q, of a row of logits [vocab], as it is sampled and sent.

    It is the softmax at the request's temperature, after the request's own filters, cut to the
    `draft_top_k` best tokens and renormalised in float32 (``docs/algorithm.md``, q): token ids [m]
    and their probabilities [m], the best token of a cut one first.

    Raises:
        EngineFailed: The logits contain NaN or +inf.
    """
    ids, best = candidates(logits, draw)
    return as_sent(ids.int().cpu().numpy(), best.float().cpu().numpy())


def candidates(logits: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the candidates of proposals and their probabilities before they are renormalised.

    Of rows of logits [..., vocab] they are token ids and float64 probabilities, some of which may
    be zero [..., draft_top_k].
    """
    probs = probabilities(logits, draw.temperature)
    probs = filter_probs(probs, *draw.filters)
    size = draw.speculation.draft_top_k
    if size is None or size >= probs.shape[-1]:  # sorting a vocabulary takes longer than the rest
        return torch.arange(probs.shape[-1], device=probs.device).expand(probs.shape), probs
    best, ids = probs.topk(size)
    return ids, best


def as_sent(
    candidate_ids: Int32Array, candidate_probs: Float32Array
) -> tuple[Int32Array, Float32Array]:
    """Return one position's candidates without impossible tokens, renormalised in float32.

    Raises:
        EngineFailed: There is none, because the logits contain NaN or +inf.
    """
    kept = candidate_probs > 0
    if not kept.any():
        raise EngineFailed(NOT_NUMBERS)
    candidate_probs = candidate_probs[kept]
    return candidate_ids[kept], candidate_probs / candidate_probs.sum(dtype=np.float32)
