"""One position on a CPU, decided by the few tokens that can still be chosen.

A row has as many numbers as the vocabulary has tokens, and nearly all of them decide nothing. Two
passes over the logits find the highest one and the sum of the weights. Then probabilities are
computed only of *contenders*: the proposed tokens, and those that a bound does not exclude.

- Sum. It is taken in float32 where only its ratio to a proposal matters. Rounding an exponent ``a``
  by a share d of it changes the sum by a share of ``d * E[a]``, whose mean is that of the softmax
  and at most the logarithm of the vocabulary's size, because the entropy is. `Row.error` covers
  that and the addition, which torch does in cascades. For `top_p`, and for `adaptive`, whose odds
  carry p from block to block, the sum is taken in float64.
- Race (`rapid.speculation.noise.race`). A token is likely if its weight is at least `_MANY` times
  the mean weight, so at most ``vocab / _MANY`` tokens are. It is early if its time is below ``_LATE
  * _MANY / vocab``. A token that is neither finishes after the quotient of both limits, which is
  `_LATE` over the sum of the weights. If a contender finished before, no other token can have won:
  in all races but one of ``e ** _LATE``, however flat the row is.
- Filters. Tokens below ``(1 - top_p) / vocab`` have less than ``1 - top_p`` together, so the
  nucleus is among the others. For `top_k` the highest logits of slices of the row are compared:
  there are at least k tokens as high as the k-th highest of them.

Everything that is not *sure*, because two numbers are closer than they are known, is left to the
specification, so that all tokens are the specification's, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rapid.messages import Float32Array
from rapid.speculation.draw import Draw
from rapid.speculation.fusion import retrieved_weight
from rapid.speculation.noise import Float64Array, Purpose, Words, numbers
from rapid.speculation.philox import keys_of, uniforms_at
from rapid.speculation.rows import FINE, MOST_ERROR, OF_PEAK, Ids, Row

_MANY = 64.0  # times the mean probability, from which a token is likely
_LATE = 7.0  # mean times of a race, before which it ends but for one in 1,100
_MOST_DRAWN = 512  # tokens whose random numbers alone are drawn
_PART = 2**15  # numbers that are drawn at once; a multiple of the four of a counter


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is decided about a position; the probabilities are for the odds of `adaptive`."""

    token: int
    is_accepted: bool
    is_sure: bool
    target_prob: float = 0.0
    told_prob: float = 0.0


@dataclass(frozen=True, slots=True)
class Fused:
    """p_hat up to a factor: weights of some tokens, and how those of all others follow from p.

    Attributes:
        row: p.
        ids: The tokens with weights of their own, no token twice [n].
        weights: Their weights [n].
        slack: Bounds of the errors of the weights beside those of the others [n].
        total: Sum of the weights of all tokens.
        error: Bound of the relative error of a quotient of a weight and the total.
        share: The weight of any other token is ``share * p * exp(sharpening * p)``.
        sharpening: See `share`.
        is_all: Whether other tokens have no weight, as after a filter.
    """

    row: Row
    ids: Ids
    weights: Float64Array
    slack: Float64Array
    total: float = 1.0
    error: float = 0.0
    share: float = 1.0
    sharpening: float = 0.0
    is_all: bool = False

    def others(self, probs: Any) -> Any:
        """Return the weights of tokens that have none of their own, by their p."""
        if not self.sharpening:
            return self.share * probs
        return self.share * probs * np.exp(self.sharpening * probs)

    def without_own(self, ids: Ids) -> Ids:
        """Return the tokens among some that have no weight of their own."""
        if not len(self.ids):
            return ids
        is_own = np.zeros(len(self.row.logits), dtype=np.bool_)
        is_own[self.ids] = True
        return ids[~is_own[ids]]

    def at(self, token: int) -> tuple[float, float]:
        """Return the weight and the slack of a token that has its own; otherwise zeros."""
        place = np.flatnonzero(self.ids == token)
        return float(self.weights[place].sum()), float(self.slack[place].sum())


def decided(
    logits: torch.Tensor, ids: Ids, draft: Float64Array, drafted: int, draw: Draw, log_odds: float
) -> Outcome:
    """Decide one drafted token as `rapid.speculation.acceptance.judge` does.

    Args:
        logits: float32, on the CPU [vocab].
        ids: Candidates of the proposal, none twice [m].
        draft: Their probabilities, of sum one [m].
        drafted: The drafted token.
        draw: Settings, and the position of the token.
        log_odds: Those of the tokens before, for `adaptive`.
    """
    speculation = draw.speculation
    if draw.is_greedy and speculation.eta == 0:
        token, is_sure = best_logit(logits.numpy(), draw.temperature)
        return Outcome(token, token == drafted, is_sure)
    is_fine = speculation.is_witnessed or (draw.sampling.top_p < 1 and not draw.is_greedy)
    row = Row.read(logits, draw.temperature, is_fine=is_fine)
    if not row.error < MOST_ERROR:
        return Outcome(drafted, False, False)
    fused = _fused(row, ids, draft, draw, log_odds)
    token, is_accepted, is_sure = _settled(fused, ids, draft, drafted, draw)
    if not speculation.is_witnessed:
        return Outcome(token, is_accepted, is_sure)
    target_prob = float(row.probs(np.array([token]))[0])
    return Outcome(token, is_accepted, is_sure, target_prob, float(draft[ids == token].sum()))


def drawn(logits: torch.Tensor, draw: Draw) -> tuple[int, bool]:
    """Return a token of p after filters, as `rapid.speculation.acceptance.decode_token` does.

    Returns:
        The token, and whether it is sure.
    """
    if draw.is_greedy:
        return best_logit(logits.numpy(), draw.temperature)
    row = Row.read(logits, draw.temperature, is_fine=draw.sampling.top_p < 1)
    if not row.error < MOST_ERROR:
        return 0, False
    none = np.zeros(0)
    kept, is_sure = _filtered(Fused(row, none.astype(np.int64), none, none), draw)
    token, is_first = _raced(kept, draw, Purpose.RESULT)
    return token, is_sure and is_first


def best_logit(logits: Float32Array, temperature: float) -> tuple[int, bool]:
    """Return the token with the highest logit, and whether p has it alone there."""
    token = int(logits.argmax())
    peak = float(logits[token])
    before, after = logits[:token], logits[token + 1 :]
    second = max(float(part.max(initial=-np.inf)) for part in (before, after))
    is_alone = second < peak - temperature * FINE - OF_PEAK * abs(peak)
    return token, math.isfinite(peak) and is_alone


def _fused(row: Row, ids: Ids, draft: Float64Array, draw: Draw, log_odds: float) -> Fused:
    """Return p_hat before filters, for every rule of `rapid.speculation.fusion.fused_probs`."""
    speculation, eta = draw.speculation, draw.speculation.eta
    probs = row.probs(ids)
    if eta == 0:
        return Fused(row, ids, probs, np.zeros(len(ids)), 1.0, row.error)
    if speculation.transfer == "mixture":
        moved = probs + eta * draft
        return Fused(row, ids, moved, moved * row.error, 1 + eta, row.error)
    best = draft.max()
    is_plausible = draft >= speculation.plausibility * best
    if speculation.transfer == "adaptive":
        weight = retrieved_weight(log_odds)
        mixed = (1 - weight) * probs + weight * draft * is_plausible
        error = row.error * (1 + eta)
        slack = is_plausible * mixed * error
        if draw.is_greedy:  # sharpening does not change the order
            return Fused(row, ids, mixed, slack, share=1 - weight)
        sharpened = mixed * np.exp(eta * weight * mixed)
        slack = is_plausible * sharpened * error
        share, sharpening = 1 - weight, eta * weight * (1 - weight)
        fused = Fused(row, ids, sharpened, slack, 1.0, error, share, sharpening)
        return _summed(fused, probs, min(_MANY, (1 - draw.sampling.top_p) / 2 or _MANY))
    move, certainty = draft - probs, 1 / row.total
    scale = 1.0
    if speculation.transfer == "boost":
        move = move.clip(min=0)
        scale = 2 * best / (best + certainty)
    moved = probs * np.exp(eta * scale * move * is_plausible)
    slack = moved * row.error * (1 + eta * scale * (probs + abs(move)))
    slack *= moved != probs
    total = 1.0 + float((moved - probs).sum())
    error = row.error + (row.error + float(slack.sum())) / total
    return Fused(row, ids, moved, slack, total, error)


def _summed(fused: Fused, probs: Float64Array, times: float) -> Fused:
    """Return p_hat of `adaptive` with its total; `probs` are p of the candidates.

    Tokens with at least `times` the mean probability are added one by one. Sharpening multiplies
    the others by hardly more than one: at most by what it would for the likeliest of them.
    """
    most = times / len(fused.row.logits)
    likely = fused.row.probs(fused.without_own(fused.row.at_least(most)))
    rest = fused.share * max(1 - float(probs.sum()) - float(likely.sum()), 0.0)
    half = rest * math.expm1(fused.sharpening * most) / 2
    total = float(fused.weights.sum()) + float(fused.others(likely).sum()) + rest + half
    return replace(fused, total=total, error=fused.error + (half + fused.error) / total)


def _filtered(fused: Fused, draw: Draw) -> tuple[Fused, bool]:
    """Return the weights that `rapid.speculation.sampling.filter_probs` keeps; all without filters.

    Returns:
        The kept weights, and whether they are sure to be the right ones.
    """
    row, sampling = fused.row, draw.sampling
    vocab, top_p = len(row.logits), sampling.top_p
    top_k = min(sampling.top_k or vocab, vocab)
    if top_k == vocab and top_p >= 1:
        return fused, True
    if top_k < vocab:
        likely = row.highest(top_k + len(fused.ids) + 1)
    else:
        least = (1 - top_p) * fused.total / (2 * vocab * fused.share)
        likely = row.at_least(least * math.exp(-fused.sharpening * least))
    likely = fused.without_own(likely)
    ids = np.concatenate([fused.ids, likely])
    weights = np.concatenate([fused.weights, fused.others(row.probs(likely))])
    slack = np.concatenate([fused.slack, np.zeros(len(likely))])
    order = np.argsort(-weights)
    best = weights[order]
    total = fused.total if top_k == vocab else float(best[:top_k].sum())
    num_kept, is_sure = min(top_k, len(best)), len(best) > top_k
    if top_p < 1:
        before = (best[:num_kept].cumsum() - best[:num_kept]) / total
        close = 4 * fused.error + row.rounding
        num_within = int(before.searchsorted(top_p))
        is_far = before.searchsorted(top_p - close) == before.searchsorted(top_p + close)
        is_within = num_within < num_kept
        num_kept, is_sure = num_within, bool(is_far) and (is_sure or is_within)
    slack_of, close = slack[order], 2 * row.rounding * (1 + fused.sharpening)
    lowest = float((best - slack_of)[:num_kept].min()) * (1 - close)
    highest = float((best + slack_of)[num_kept:].max(initial=0)) * (1 + close)
    if highest >= lowest:  # of equal tokens the lower ids are kept
        is_tied = (best + slack_of >= lowest) & (best - slack_of <= highest)
        tied = order[is_tied]
        is_sure &= not slack[tied].any() and len(np.unique(row.logits[ids[tied]])) == 1
        order[is_tied] = tied[np.argsort(ids[tied])]
    kept = order[:num_kept]
    weights = weights[kept]
    return replace(
        fused, ids=ids[kept], weights=weights, slack=slack[kept],
        total=float(weights.sum()), error=2 * fused.error, is_all=True,
    ), is_sure  # fmt: skip


def _settled(
    fused: Fused, ids: Ids, draft: Float64Array, drafted: int, draw: Draw
) -> tuple[int, bool, bool]:
    """Return the token of a position, whether the drafted one was accepted, and if that is sure."""
    if draw.is_greedy:  # filters keep the best token
        token, is_sure = _best(fused)
        return token, token == drafted, is_sure
    kept, is_sure = _filtered(fused, draw)
    if draw.speculation.coupling == "shared_noise":
        token, is_first = _raced(kept, draw, Purpose.RESULT)
        return token, token == drafted, is_sure and is_first
    proposed = float(draft[ids == drafted].sum()) * kept.total
    weight, slack = kept.at(drafted)
    if not proposed > 0:
        return drafted, False, False
    chance = weight / proposed
    number = float(draw.noise(Purpose.ACCEPT, 1)[0])
    is_sure &= abs(number - chance) > slack / proposed + (kept.error + fused.row.rounding) * chance
    if number < chance or not is_sure:
        return drafted, number < chance, is_sure
    token, is_first = _raced(_residual(kept, ids, draft), draw, Purpose.RESIDUAL)
    return token, False, is_first


def _residual(fused: Fused, ids: Ids, draft: Float64Array) -> Fused:
    """Return what p_hat has more than q."""
    wanted = draft * fused.total
    if fused.is_all:
        dense = np.zeros(len(fused.row.logits))
        dense[ids] = wanted
        wanted = dense[fused.ids]
    excess = (fused.weights - wanted).clip(min=0)
    slack = fused.slack + (wanted + fused.weights) * fused.error
    slack = np.where(wanted > 0, slack, fused.slack)
    others = max(fused.total - float(fused.weights.sum()), 0.0)
    mass = max(others + float(excess.sum()), FINE * fused.total)
    return replace(fused, weights=excess, slack=slack, total=mass)


def _best(fused: Fused) -> tuple[int, bool]:
    """Return the token with the highest weight, and whether it is sure to have it."""
    row = fused.row
    least = float((fused.weights - fused.slack).max()) * (1 - MOST_ERROR) / fused.share
    others = fused.without_own(row.at_least(min(least, 1 / row.total)))
    ids = np.concatenate([fused.ids, others])
    weights = np.concatenate([fused.weights, fused.share * row.probs(others)])
    slack = np.concatenate([fused.slack, np.zeros(len(others))]) + 2 * row.rounding * weights
    best = int(weights.argmax())
    may_be_best = weights + slack >= weights[best] - slack[best]
    return int(ids[best]), int(np.count_nonzero(may_be_best)) == 1


def _raced(fused: Fused, draw: Draw, purpose: Purpose) -> tuple[int, bool]:
    """Draw a token by the race of `rapid.speculation.noise.race`.

    Returns:
        The token, and whether it is sure to be the first.
    """
    row, vocab = fused.row, len(fused.row.logits)
    ids, weights, slack, limit = fused.ids, fused.weights, fused.slack, math.inf
    if fused.is_all and len(ids) <= _MOST_DRAWN:
        uniforms = uniforms_at(keys_of([draw], purpose), ids[None])[0]
    else:
        most = min(_MANY / vocab * fused.total / fused.share, 1 / row.total)
        late = math.inf
        may_win = np.zeros(vocab, dtype=np.bool_)
        if not fused.is_all:
            late = _LATE * _MANY / vocab
            limit = late / float(fused.others(most)) * (1 - MOST_ERROR)
            np.greater_equal(row.logits, row.logit_of(most), out=may_win)
        may_win[ids] = True
        contenders, words = _drawn_words(draw.generator(purpose), may_win, math.exp(-late))
        uniforms, own = numbers(words), contenders.searchsorted(ids)
        weights, slack = fused.others(row.probs(contenders)), np.zeros(len(contenders))
        ids, weights[own], slack[own] = contenders, fused.weights, fused.slack
    times = -np.log(uniforms)
    with np.errstate(divide="ignore", over="ignore"):
        finish = times / weights
        first = int(finish.argmin())
        earliest = times / (weights + slack)
        latest = times[first] / np.maximum(weights[first] - slack[first], 0.0)
    latest *= 1 + 4 * row.rounding * (1 + fused.sharpening)
    earliest[first] = math.inf
    return int(ids[first]), bool(latest < limit and latest < earliest.min())


def _drawn_words(
    generator: np.random.Philox, may_win: npt.NDArray[np.bool_], least: float
) -> tuple[Ids, Words]:
    """Return the tokens that may win, or whose number is at least `least`, with their words.

    Words are drawn in parts that stay in the cache.
    """
    ids, words = [], []
    bound = np.uint64(min(int(least * 2.0**64), 2**64 - 1)) if least else None
    for start in range(0, len(may_win), _PART):
        part = may_win[start : start + _PART]
        drawn = generator.random_raw(len(part))
        chosen = np.flatnonzero(part if bound is None else part | (drawn >= bound))
        ids.append(chosen + start)
        words.append(drawn[chosen])
    return np.concatenate(ids), np.concatenate(words)
