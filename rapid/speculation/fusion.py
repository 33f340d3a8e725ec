"""The fused distribution: the target's, moved towards what the drafter read in retrieved text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from rapid.speculation.sampling import probabilities

if TYPE_CHECKING:
    from rapid.config import Transfer

_TEMPER = 0.3
_MEMORY = 0.9
_MOST = 4.0
_LEAST_PROBABILITY = 1e-3


def fused_probs(
    target_logits: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    temperature: float,
    transfer: Transfer,
    eta: float,
    plausibility: float,
    log_odds: float = 0.0,
) -> torch.Tensor:
    """Return ``p_hat = softmax(z/T + eta * g(q, p) * [q >= a * max q])`` in float64 [k, vocab].

    `distill` is one gradient step of the drafter teaching the target, g = q - p (RAPID, arXiv
    2502.20330, Eq. 6, with the reference code's mask on q). `boost` is its positive part, weighted
    by the two certainties, ``g = 2 max q / (max q + max p) * max(q - p, 0)``: the drafter can only
    add, and adds the more, the more certain it is compared with the target. `adaptive` is boost
    with the eta that `adapted_eta` makes of the committed text. eta = 0 gives the target's own p,
    bit for bit.

    `mixture` moves probabilities instead of logits: ``p_hat = (p + eta q) / (1 + eta)``, which is
    the speculative ensemble (Fu et al., arXiv 2502.01662), the plain mean of both at eta = 1.

    Args:
        target_logits: z [k, vocab].
        draft_probs: q, dense, zero where the proposal was cut [k, vocab].
        temperature: T of p and q.
        transfer: The form of g, or `mixture`.
        eta: Strength of the move; in a `mixture` the weight of q beside p's 1.
        plausibility: a; tokens whose draft probability is below this share of the best one's are
            not moved. A `mixture` takes q whole.
        log_odds: Result of `observed` for the tokens committed so far; only `adaptive` uses it.
    """
    target_probs = probabilities(target_logits, temperature)
    if eta == 0:
        return target_probs
    draft_probs = draft_probs.double()
    if transfer == "mixture":
        return (target_probs + eta * draft_probs) / (1 + eta)
    best = draft_probs.amax(dim=-1, keepdim=True)
    move = draft_probs - target_probs
    if transfer == "adaptive":
        eta = adapted_eta(eta, log_odds)
    if transfer != "distill":
        certainty = target_probs.amax(dim=-1, keepdim=True)
        move = move.clamp(min=0) * 2 * best / (best + certainty)
    plausible = draft_probs >= plausibility * best
    shifted = target_logits.double() / temperature + eta * move * plausible
    return torch.softmax(shifted, dim=-1)


def adapted_eta(eta: float, log_odds: float) -> float:
    """Return ``eta * min(4, exp(0.3 * log_odds))``, the strength at one position.

    `eta` is the strength before anything is committed. It grows while the drafter foretells the
    answer better than the target, and vanishes while it does worse.
    """
    return eta * math.exp(min(_TEMPER * log_odds, math.log(_MOST)))


def observed(log_odds: float, target_prob: float, draft_prob: float) -> float:
    """Return the log odds of drafter against target after one more committed token.

    They are ``sum over i of 0.9^(t - i) * log(q(y_i) / p(y_i))``, with probabilities below 1e-3
    taken for 1e-3: a Bayes factor of the two readings of the text so far that forgets, so that a
    long answer does not decide for its end what only its beginning showed.

    Args:
        log_odds: The log odds before the token; 0 before the first.
        target_prob: p(y) of the committed token y, before filters.
        draft_prob: q(y) of the same token.
    """
    told = math.log(max(draft_prob, _LEAST_PROBABILITY))
    return _MEMORY * log_odds + told - math.log(max(target_prob, _LEAST_PROBABILITY))
