"""The fused distribution: the target's, moved towards what the drafter read in retrieved text."""

from __future__ import annotations

import math

import torch

from rapid.errors import BadRequest
from rapid.speculation.sampling import probabilities
from rapid.transfers import OWN_RULES, OwnRule

TEMPER = 0.4
MEMORY = 0.85
LEAST_PROBABILITY = 1e-3


def fuse_probs(
    target_logits: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    temperature: float,
    transfer: str,
    eta: float,
    plausibility: float,
    log_odds: float = 0.0,
) -> torch.Tensor:
    """Return the distribution p_hat that the answer follows, before filters, float64 [k, vocab].

    `distill` and `boost` are ``softmax(z/T + eta * g(q, p) * [q >= a * max q])``. `distill` is one
    gradient step of the drafter teaching the target, g = q - p (RAPID, arXiv 2502.20330, Eq. 6,
    with the reference code's mask on q). `boost` is its positive part, weighted by the two
    certainties, ``g = 2 max q / (max q + max p) * max(q - p, 0)``: the drafter can only add, and
    adds the more, the more certain it is compared with the target.

    `adaptive` is ``norm(m * exp(eta * w * m))`` of the mixture ``m = (1 - w) * p + w * q * [q >= a
    * max q]``, whose weight w is `weigh_retrieved` of the committed text.

    `mixture` is ``p_hat = (p + eta q) / (1 + eta)``, with q whole: the speculative ensemble (Fu et
    al., arXiv 2502.01662). eta = 0 gives the target's own p, bit for bit. Other names are those of
    `rapid.register_transfer`.

    Args:
        target_logits: z [k, vocab].
        draft_probs: q, dense, zero where the proposal was cut [k, vocab]. For `adaptive` it is the
            mean of q and the target's own distribution on the retrieved text, if there is one.
        temperature: T of p and q.
        eta: Strength of the move; of `adaptive` it only sharpens, and keeps the best token.
        plausibility: a, the share of the best draft probability below which nothing is moved.
        log_odds: Result of `update_log_odds` for the tokens committed so far, for `adaptive`.

    Raises:
        BadRequest: A registered rule failed, or returned what are no weights.
    """
    target_probs = probabilities(target_logits, temperature)
    if eta == 0:
        return target_probs
    draft_probs = draft_probs.double()
    if transfer == "mixture":
        return (target_probs + eta * draft_probs) / (1 + eta)
    if (rule := OWN_RULES.get(transfer)) is not None:
        return _apply(rule, transfer, target_probs, draft_probs, eta)
    best = draft_probs.amax(dim=-1, keepdim=True)
    plausible = draft_probs >= plausibility * best
    if transfer == "adaptive":
        weight = weigh_retrieved(log_odds)
        mixed = (1 - weight) * target_probs + weight * draft_probs * plausible
        return torch.softmax(mixed.log() + eta * weight * mixed, dim=-1)
    move = draft_probs - target_probs
    if transfer == "boost":
        certainty = target_probs.amax(dim=-1, keepdim=True)
        move = move.clamp(min=0) * 2 * best / (best + certainty)
    shifted = target_logits.double() / temperature + eta * move * plausible
    return torch.softmax(shifted, dim=-1)


def _apply(
    rule: OwnRule, name: str, target_probs: torch.Tensor, draft_probs: torch.Tensor, eta: float
) -> torch.Tensor:
    """Return the distribution that a registered rule gives."""
    try:
        # Copies, as the rest of the judgement compares with the same p and q.
        weights = torch.as_tensor(rule(target_probs.clone(), draft_probs.clone(), eta)).double()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise BadRequest(f"the transfer rule {name!r} failed ({what})", "transfer") from error
    possible = (target_probs > 0) | (draft_probs > 0)
    if weights.shape != target_probs.shape:
        what = f"the shape {list(weights.shape)} in place of {list(target_probs.shape)}"
    elif not bool((weights.isfinite() & (weights >= 0)).all() and weights.any(dim=-1).all()):
        what = "weights that are not finite, at least 0 and somewhere above it"
    elif bool((weights[~possible] > 0).any()):
        what = "weight for tokens that target and drafter rule out, as a grammar does"
    else:
        return weights / weights.sum(dim=-1, keepdim=True)
    raise BadRequest(f"the transfer rule {name!r} returned {what}", "transfer")


def weigh_retrieved(log_odds: float) -> float:
    """Return the weight in (0, 1) of the reading of the retrieved text at one position.

    Its odds are ``0.999 * exp(0.4 * log_odds)``. It begins next to one half, where the surer of the
    two readings prevails, and the document's if they are equally sure to one in a thousand.
    """
    odds = (1 - LEAST_PROBABILITY) * math.exp(TEMPER * log_odds)
    return odds / (1 + odds)


def update_log_odds(log_odds: float, target_prob: float, draft_prob: float) -> float:
    """Return the log odds of the retrieved text's reading after one more committed token y.

    They are ``sum over i of 0.85^(t - i) * log(q(y_i) / p(y_i))``, with probabilities below 1e-3
    taken for 1e-3: a Bayes factor of the two readings of the text so far that forgets, so that a
    long answer does not decide for its end what only its beginning showed.

    Args:
        log_odds: The log odds before the token; 0 before the first.
        target_prob: p(y), before filters.
        draft_prob: q(y), with the q that `fuse_probs` was given.
    """
    told = math.log(max(draft_prob, LEAST_PROBABILITY))
    return MEMORY * log_odds + told - math.log(max(target_prob, LEAST_PROBABILITY))
