"""One position on a CPU, decided by the few tokens that can still be chosen.

Two passes over the logits find the highest one and the sum of the weights. Then probabilities are
computed only of *contenders*: the proposed tokens, and those that a bound does not exclude.

It is the fast form for CPUs, with `rows`: at 128,256 tokens, six blocks of eight
are judged here in 15 to 36 ms, and by operations on whole rows in 65 to 215
(`benchmarks/results/sampling.md`). On CUDA that is `rapid.speculation.fast.row_kernels`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from rapid.messages import Float32Array, Int32Array
from rapid.receipt import TokenProbs
from rapid.speculation.acceptance import draft_purpose, propose
from rapid.speculation.draw import Draw, keys_of, uniforms_at
from rapid.speculation.fast.rows import (
    FINE,
    MANY,
    MOST_ERROR,
    OF_PEAK,
    Fused,
    Ids,
    Proposal,
    Row,
    fuse_row,
    read_proposal,
)
from rapid.speculation.noise import Float64Array, Purpose, Words, numbers, race
from rapid.speculation.questions import Proposed

_LATE = 7.0  # mean times of a race, before which it ends but for one in 1,100
_MOST_DRAWN = 512  # tokens whose random numbers alone are drawn
_SPARSE = 50_000  # tokens of a vocabulary from which a proposal's candidates alone have numbers
_MOST_PROPOSED = 1024  # candidates for which that is so
_PART = 2**15  # numbers that are drawn at once; a multiple of the four of a counter


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is decided about a position; the probabilities are for the odds of `adaptive`."""

    token: int
    is_accepted: bool
    is_sure: bool
    target_prob: float = 0.0
    told_prob: float = 0.0
    probs: tuple[TokenProbs, ...] = ()  # one, if it was asked for


def decide(
    logits: torch.Tensor,
    ids: Ids,
    draft: Float64Array,
    drafted: int,
    draw: Draw,
    log_odds: float,
    witness_logits: torch.Tensor | None = None,
    *,
    explains: bool = False,
) -> Outcome:
    """Decide one drafted token as `rapid.speculation.acceptance.judge` does.

    Args:
        logits: float32, on the CPU [vocab].
        ids: Candidates of the proposal, none twice [m].
        draft: Their probabilities, of sum one [m].
        log_odds: Those of the tokens before, for `adaptive`.
        witness_logits: The target's logits after the retrieved text [vocab], if any.
        explains: Whether the outcome says how likely its token was.
    """
    speculation, temperature = draw.speculation, draw.temperature
    if draw.is_greedy and speculation.eta == 0 and not explains:
        token, is_sure = best_logit(logits.numpy(), temperature)
        return Outcome(token, token == drafted, is_sure)
    is_cut = draw.sampling.top_p < 1 and not draw.is_greedy
    is_fine = speculation.is_witnessed or is_cut or explains
    row, witness = Row.read(logits, temperature, is_fine=is_fine, is_whole=explains), None
    if speculation.is_witnessed and witness_logits is not None:
        witness = Row.read(witness_logits, temperature, is_fine=True)
    if not max(row.error, witness.error if witness else 0.0) < MOST_ERROR:
        return Outcome(drafted, False, False)
    told = read_proposal(ids, draft, speculation.plausibility, witness)
    if not told.is_sure:
        return Outcome(drafted, False, False)
    fused = fuse_row(row, told, draw, log_odds)
    token, is_accepted, is_sure = _settle(fused, told, drafted, draw)
    if not speculation.is_witnessed and not explains:
        return Outcome(token, is_accepted, is_sure)
    chosen, draft_prob = np.array([token]), float(draft[ids == token].sum())
    told_prob, target_prob = draft_prob, float(row.probs(chosen)[0])
    if witness is not None:
        told_prob = (told_prob + float(witness.probs(chosen)[0])) / 2
    probs: tuple[TokenProbs, ...] = ()
    if explains:
        whole = fuse_row(row, told, draw, log_odds, is_whole=True)
        probs = (TokenProbs(target_prob, draft_prob, whole.prob(token)),)
    return Outcome(token, is_accepted, is_sure, target_prob, told_prob, probs)


def draw_token(logits: torch.Tensor, draw: Draw) -> tuple[int, bool]:
    """Return a token of p after filters, as `decode_token` draws it, and whether it is sure."""
    if draw.is_greedy:
        return best_logit(logits.numpy(), draw.temperature)
    row = Row.read(logits, draw.temperature, is_fine=draw.sampling.top_p < 1)
    if not row.error < MOST_ERROR:
        return 0, False
    none = np.zeros(0)
    kept, is_sure = _filter(Fused(row, none.astype(np.int64), none, none), draw)
    token, is_first = _race(kept, draw, Purpose.RESULT)
    return token, is_sure and is_first


def own_prob(logits: torch.Tensor, token: int, draw: Draw) -> TokenProbs:
    """Return what `rapid.speculation.acceptance.own_probs` does, in less time."""
    row = Row.read(logits, draw.temperature, is_fine=True)
    prob = float(row.probs(np.array([token]))[0])
    return TokenProbs(target=prob, sampled=prob)


def propose_sparsely(ids: Int32Array, probs: Float32Array, draw: Draw) -> Proposed:
    """Draw a token as `propose` does; from a long vocabulary with the candidates' numbers alone."""
    if draw.is_greedy or ids.max() < _SPARSE or len(ids) > _MOST_PROPOSED:
        return Proposed(propose(ids, probs, draw), ids, probs)
    noise = uniforms_at(keys_of([draw], draft_purpose(draw)), ids[None])[0]
    return Proposed(int(ids[race(probs.astype(np.float64), noise)]), ids, probs)


def best_logit(logits: Float32Array, temperature: float) -> tuple[int, bool]:
    """Return the token with the highest logit, and whether p has it alone there."""
    token = int(logits.argmax())
    peak = float(logits[token])
    before, after = logits[:token], logits[token + 1 :]
    second = max(float(part.max(initial=-np.inf)) for part in (before, after))
    is_alone = second < peak - temperature * FINE - OF_PEAK * abs(peak)
    return token, math.isfinite(peak) and is_alone


def _filter(fused: Fused, draw: Draw) -> tuple[Fused, bool]:
    """Return the weights that `filter_probs` keeps, and whether they are sure to be these."""
    # Tokens below (1 - top_p) / vocab have less than 1 - top_p together, so the nucleus is among
    # the others. At least k tokens are as high as the k-th highest of the slices of a row.
    row, sampling = fused.row, draw.sampling
    vocab, top_p, is_cut_well = len(row.logits), sampling.top_p, True
    top_k = min(sampling.top_k or vocab, vocab)
    if sampling.min_p > 0:
        fused, is_cut_well = _drop_unlikely(fused, sampling.min_p)
    if top_k == vocab and top_p >= 1:
        return fused, is_cut_well
    if fused.is_all:
        likely = fused.ids[:0]
    elif top_k < vocab:
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
    num_kept, is_sure = min(top_k, len(best)), fused.is_all or len(best) > top_k
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
    ), is_sure and is_cut_well  # fmt: skip


def _drop_unlikely(fused: Fused, min_p: float) -> tuple[Fused, bool]:
    """Return the weights of at least `min_p` times the highest, and whether they are these."""
    row, weights, slack = fused.row, fused.weights, fused.slack
    peaks = fused.without_own(row.at_least(1 / row.total))
    best = max(weights.max(initial=0), fused.others(row.probs(peaks)).max(initial=0))
    least = min_p * float(best) / fused.share * (1 - MOST_ERROR)
    others = fused.without_own(row.at_least(least * math.exp(-fused.sharpening * least)))
    ids = np.concatenate([fused.ids, others])
    weights = np.concatenate([weights, fused.others(row.probs(others))])
    slack = np.concatenate([slack, np.zeros(len(others))])
    close = 2 * row.rounding * (1 + fused.sharpening)
    is_kept = weights >= min_p * weights.max()
    is_close = weights + slack >= min_p * (weights - slack).max() * (1 - close)
    is_close &= weights - slack <= min_p * (weights + slack).max() * (1 + close)
    is_close[weights.argmax()] = False  # the best one stays
    kept = weights[is_kept]
    return replace(
        fused, ids=ids[is_kept], weights=kept, slack=slack[is_kept],
        total=float(kept.sum()), error=2 * fused.error, is_all=True,
    ), not is_close.any()  # fmt: skip


def _settle(fused: Fused, told: Proposal, drafted: int, draw: Draw) -> tuple[int, bool, bool]:
    """Return the token of a position, whether the drafted one was accepted, and if that is sure."""
    if draw.is_greedy:  # filters keep the best token
        token, is_sure = _best(fused)
        return token, token == drafted, is_sure
    kept, is_sure = _filter(fused, draw)
    if draw.speculation.coupling == "shared_noise":
        token, is_first = _race(kept, draw, Purpose.RESULT)
        return token, token == drafted, is_sure and is_first
    proposed = float(told.draft[told.ids == drafted].sum()) * kept.total
    weight, slack = kept.at(drafted)
    if not proposed > 0:
        return drafted, False, False
    chance = weight / proposed
    number = float(draw.noise(Purpose.ACCEPT, 1)[0])
    is_sure &= abs(number - chance) > slack / proposed + (kept.error + fused.row.rounding) * chance
    if number < chance or not is_sure:
        return drafted, number < chance, is_sure
    token, is_first = _race(_residual(kept, told), draw, Purpose.RESIDUAL)
    return token, False, is_first


def _residual(fused: Fused, told: Proposal) -> Fused:
    """Return what p_hat has more than q."""
    wanted = told.draft * fused.total
    if fused.is_all:
        dense = np.zeros(len(fused.row.logits))
        dense[told.ids] = wanted
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


def _race(fused: Fused, draw: Draw, purpose: Purpose) -> tuple[int, bool]:
    """Draw a token by `rapid.speculation.noise.race`; return it, and whether it is sure to win."""
    # A token is likely if its weight is at least `MANY` times the mean, and early if its time is
    # below _LATE * MANY / vocab. One that is neither finishes after the quotient of both limits,
    # _LATE over the sum of the weights. If a contender finished before, no other can have won: in
    # all races but one of e ** _LATE, however flat the row is.
    row, vocab = fused.row, len(fused.row.logits)
    ids, weights, slack, limit = fused.ids, fused.weights, fused.slack, math.inf
    if fused.is_all and len(ids) <= _MOST_DRAWN:
        uniforms = uniforms_at(keys_of([draw], purpose), ids[None])[0]
    else:
        most = min(MANY / vocab * fused.total / fused.share, 1 / row.total)
        late = math.inf
        may_win = np.zeros(vocab, dtype=np.bool_)
        if not fused.is_all:
            late = _LATE * MANY / vocab
            limit = late / float(fused.others(most)) * (1 - MOST_ERROR)
            np.greater_equal(row.logits, row.logit_of(most), out=may_win)
        may_win[ids] = True
        contenders, words = _draw_words(draw.generator(purpose), may_win, math.exp(-late))
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


def _draw_words(
    generator: np.random.Philox, may_win: npt.NDArray[np.bool_], least: float
) -> tuple[Ids, Words]:
    """Return the tokens that may win, or whose number is at least `least`, with their words."""
    ids, words = [], []
    bound = np.uint64(min(int(least * 2.0**64), 2**64 - 1)) if least else None
    for start in range(0, len(may_win), _PART):
        part = may_win[start : start + _PART]
        drawn = generator.random_raw(len(part))
        chosen = np.flatnonzero(part if bound is None else part | (drawn >= bound))
        ids.append(chosen + start)
        words.append(drawn[chosen])
    return np.concatenate(ids), np.concatenate(words)
