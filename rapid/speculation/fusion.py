"""The fused distribution: the target's, moved towards what the drafter read in retrieved text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rapid.speculation.sampling import probabilities

if TYPE_CHECKING:
    from rapid.config import Transfer


def fused_probs(
    target_logits: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    temperature: float,
    transfer: Transfer,
    eta: float,
    plausibility: float,
) -> torch.Tensor:
    """Return ``p_hat = softmax(z/T + eta * g(q, p) * [q >= a * max q])`` in float64 [k, vocab].

    `distill` is one gradient step of the drafter teaching the target, g = q - p (RAPID, arXiv
    2502.20330, Eq. 6, with the reference code's mask on q). `boost` is its positive part, weighted
    by the two certainties, ``g = 2 max q / (max q + max p) * max(q - p, 0)``: the drafter can only
    add, and adds the more, the more certain it is compared with the target. eta = 0 gives the
    target's own p, bit for bit.

    Args:
        target_logits: z [k, vocab].
        draft_probs: q, dense, zero where the proposal was cut [k, vocab].
        temperature: T of p and q.
        transfer: The form of g, `distill` or `boost`.
        eta: Strength of the move.
        plausibility: a; tokens whose draft probability is below this share of the best one's are
            not moved.
    """
    target_probs = probabilities(target_logits, temperature)
    if eta == 0:
        return target_probs
    draft_probs = draft_probs.double()
    best = draft_probs.amax(dim=-1, keepdim=True)
    move = draft_probs - target_probs
    if transfer == "boost":
        certainty = target_probs.amax(dim=-1, keepdim=True)
        move = move.clamp(min=0) * 2 * best / (best + certainty)
    plausible = draft_probs >= plausibility * best
    shifted = target_logits.double() / temperature + eta * move * plausible
    return torch.softmax(shifted, dim=-1)
