"""A row of logits on a CPU, of which only the probabilities that are asked for are computed.

Of the fused distribution only weights of proposed tokens are, and under `adaptive` those of tokens
that a witness finds likely.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rapid.messages import Float32Array
from rapid.speculation.draw import Draw
from rapid.speculation.fusion import weigh_retrieved
from rapid.speculation.noise import Float64Array

Ids = npt.NDArray[np.int64]

# Relative error of a sum of float32 weights. Rounding an exponent a by a share d of it changes the
# sum by a share of d * E[a], at most the logarithm of the vocabulary's size, as the entropy is; the
# rest is torch's addition in cascades. `top_p` and the odds of `adaptive` take the sum in float64.
_COARSE = 2e-5
FINE = 1e-12  # the same in float64, and of two quotients that are compared
OF_PEAK = 1e-15  # rounding of logits over T, in shares of the highest
MOST_ERROR = 1e-3  # relative; above it nothing is sure
MANY = 64.0  # times the mean probability, from which a token is likely
_SLICE = 64  # parts of a row, of whose logits the highest at each place are compared

_memory = threading.local()


@dataclass(frozen=True, slots=True)
class Row:
    """The target's distribution p at one position, of which a token's probability is asked for."""

    logits: Float32Array  # z [vocab]
    temperature: float  # T of p
    peak: float  # the highest logit
    total: float  # sum of ``exp((z - peak) / T)``
    error: float  # bound of the relative error of p
    rounding: float  # bound of the relative error of quotients of two probabilities
    squares: float = 0.0  # sum of ``p ** 2``, if `is_whole`

    @classmethod
    def read(
        cls, logits: torch.Tensor, temperature: float, *, is_fine: bool, is_whole: bool = False
    ) -> Row:
        """Read a row, float32 on the CPU [vocab]; of what is no number the error is infinite."""
        array: Float32Array = logits.numpy()
        best = int(array.argmax())
        peak = float(array[best])
        rounding = FINE + OF_PEAK * abs(peak) / temperature
        if not math.isfinite(peak):
            return cls(array, temperature, peak, 1.0, math.inf, rounding)
        weights = torch.from_numpy(_room(len(array), np.float64 if is_fine else np.float32))
        if is_fine:
            weights.copy_(logits)
            if temperature != 1:  # rounded as in the specification
                weights /= temperature
            weights -= peak / temperature
        else:
            torch.sub(logits, peak, out=weights)
            if temperature != 1:
                weights /= temperature
        total = float(weights.exp_().sum())
        error = rounding if is_fine else _COARSE + rounding
        squares = float(weights.dot(weights)) / total**2 if is_whole else 0.0
        return cls(array, temperature, peak, total, error, rounding, squares)

    def probs(self, ids: Ids) -> Float64Array:
        """Return p of some tokens, whose quotients are the specification's up to rounding."""
        scaled = self.logits[ids].astype(np.float64) / self.temperature
        scaled -= self.peak / self.temperature
        weights: Float64Array = np.exp(scaled, out=scaled)
        weights /= self.total
        return weights

    def logit_of(self, prob: float) -> np.float32:
        """Return a logit just below that of a token whose p is `prob`."""
        above = self.temperature * (math.log(max(prob * self.total, 1e-300)) - MOST_ERROR)
        return np.float32(self.peak + above - 1e-6 * abs(self.peak + above))

    def at_least(self, prob: float) -> Ids:
        """Return all tokens whose p is at least `prob`, and a few just below it, by their ids."""
        return np.flatnonzero(self.logits >= self.logit_of(prob))

    def highest(self, count: int) -> Ids:
        """Return tokens among which the `count` highest logits are, by their ids."""
        width = len(self.logits) // _SLICE
        if count >= width:
            return np.arange(len(self.logits))
        slices = self.logits[: width * _SLICE].reshape(_SLICE, width).max(axis=0)
        return np.flatnonzero(self.logits >= np.partition(slices, -count)[-count])


def _room(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return memory of this thread to compute in; touching new pages takes longer than summing."""
    rooms: dict[Any, npt.NDArray[Any]] = _memory.__dict__
    name = np.dtype(dtype).name
    if name not in rooms or len(rooms[name]) < size:
        rooms[name] = np.empty(size, dtype)
    return rooms[name][:size]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the retrieved text says about the tokens whose weights do not follow from p alone."""

    ids: Ids  # the proposed tokens, and with a witness those that it moves, no token twice [n]
    draft: Float64Array  # q, zero for tokens that were not proposed [n]
    # The reading that p is moved towards: q, or its mean with the witness's [n].
    probs: Float64Array
    is_plausible: npt.NDArray[np.bool_]  # whether a token is moved [n]
    error: float = 0.0  # bound of the relative error of `probs`
    # Whether no token is so close to the border of the plausible ones that it may lie on its other
    # side.
    is_sure: bool = True


@dataclass(frozen=True, slots=True)
class Fused:
    """p_hat up to a factor: weights of some tokens, and how those of all others follow from p."""

    row: Row  # p
    ids: Ids  # the tokens with weights of their own, no token twice [n]
    weights: Float64Array  # their weights [n]
    slack: Float64Array  # bounds of the errors of the weights beside those of the others [n]
    total: float = 1.0  # sum of the weights of all tokens
    error: float = 0.0  # bound of the relative error of a quotient of a weight and the total
    share: float = 1.0  # the weight of any other token is ``share * p * exp(sharpening * p)``
    sharpening: float = 0.0  # see `share`
    is_all: bool = False  # whether other tokens have no weight, as after a filter

    def others(self, probs: Any) -> Any:
        """Return the weights of tokens that have none of their own, by their p."""
        if not self.sharpening:
            return self.share * probs
        return self.share * probs * np.exp(self.sharpening * probs)

    def prob(self, token: int) -> float:
        """Return p_hat of a token; `total` must be known."""
        is_own, alone = self.ids == token, np.array([token])
        weight = self.weights[is_own] if is_own.any() else self.others(self.row.probs(alone))
        return float(weight.sum()) / self.total

    def without_own(self, ids: Ids) -> Ids:
        """Return the tokens among some that have no weight of their own."""
        return _without(ids, self.ids, len(self.row.logits))

    def at(self, token: int) -> tuple[float, float]:
        """Return the weight and the slack of a token that has its own; otherwise zeros."""
        place = np.flatnonzero(self.ids == token)
        return float(self.weights[place].sum()), float(self.slack[place].sum())


def read_proposal(
    ids: Ids, draft: Float64Array, plausibility: float, witness: Row | None
) -> Proposal:
    """Return what the proposal says, and a witness where there is one."""
    if witness is None:
        return Proposal(ids, draft, draft, draft >= plausibility * draft.max())
    probs = (draft + witness.probs(ids)) / 2
    best = max(float(probs.max()), 1 / witness.total / 2)
    least = plausibility * best
    likely = witness.at_least(2 * least)  # without a proposal, the mean is half of a witness's p
    likely = _without(likely, ids, len(witness.logits))
    probs = np.concatenate([probs, witness.probs(likely) / 2])
    is_close = abs(probs - least) < 4 * witness.error * least
    is_close[probs.argmax()] = False  # the best one is plausible
    return Proposal(
        np.concatenate([ids, likely]),
        np.concatenate([draft, np.zeros(len(likely))]),
        probs,
        probs >= least,
        witness.error,
        not is_close.any(),
    )


def fuse_row(
    row: Row, told: Proposal, draw: Draw, log_odds: float, *, is_whole: bool = False
) -> Fused:
    """Return p_hat before filters, for every rule of `rapid.speculation.fusion.fuse_probs`.

    Its sum is as exact as a decision needs, or `is_whole`, for the probabilities themselves, of a
    row that was read so.
    """
    speculation, eta = draw.speculation, draw.speculation.eta
    ids, draft, is_plausible = told.ids, told.draft, told.is_plausible
    probs = row.probs(ids)
    if eta == 0:
        return Fused(row, ids, probs, np.zeros(len(ids)), 1.0, row.error)
    if speculation.transfer == "mixture":
        moved = probs + eta * draft
        return Fused(row, ids, moved, moved * row.error, 1 + eta, row.error)
    if speculation.transfer == "adaptive":
        weight = weigh_retrieved(log_odds)
        mixed = (1 - weight) * probs + weight * told.probs * is_plausible
        error = (row.error + told.error) * (1 + eta)
        slack = is_plausible * mixed * error
        if draw.is_greedy and not is_whole:  # sharpening does not change the order
            return Fused(row, ids, mixed, slack, share=1 - weight)
        sharpened = mixed * np.exp(eta * weight * mixed)
        slack = is_plausible * sharpened * error
        share, sharpening = 1 - weight, eta * weight * (1 - weight)
        fused = Fused(row, ids, sharpened, slack, 1.0, error, share, sharpening)
        times = 1.0 if is_whole else min(MANY, (1 - draw.sampling.top_p) / 2 or MANY)
        return _sum_weights(fused, probs, times, is_whole=is_whole)
    move, certainty = draft - probs, 1 / row.total
    scale = 1.0
    if speculation.transfer == "boost":
        move, best = move.clip(min=0), draft.max()
        scale = 2 * best / (best + certainty)
    moved = probs * np.exp(eta * scale * move * is_plausible)
    slack = moved * row.error * (1 + eta * scale * (probs + abs(move)))
    slack *= moved != probs
    total = max(1.0 + float((moved - probs).sum()), FINE)  # `distill` may leave next to nothing
    error = row.error + (row.error + float(slack.sum())) / total
    return Fused(row, ids, moved, slack, total, error)


def _sum_weights(fused: Fused, probs: Float64Array, times: float, *, is_whole: bool) -> Fused:
    """Return p_hat of `adaptive` with its total; `probs` are p of the candidates."""
    # Tokens with at least `times` the mean probability are added one by one. Sharpening multiplies
    # the others at most by what it would for the likeliest of them.
    most = min(times / len(fused.row.logits), 1.0)  # of few tokens, that is more than any has
    likely = fused.row.probs(fused.without_own(fused.row.at_least(most)))
    rest = fused.share * max(1 - float(probs.sum()) - float(likely.sum()), 0.0)
    half = rest * math.expm1(fused.sharpening * most) / 2
    if is_whole:  # a sharpened p is p + sharpening * p ** 2, but for even higher powers
        squares = max(fused.row.squares - float((probs**2).sum() + (likely**2).sum()), 0.0)
        half = fused.share * fused.sharpening * squares
    total = float(fused.weights.sum()) + float(fused.others(likely).sum()) + rest + half
    return replace(fused, total=total, error=fused.error + (half + fused.error) / total)


def _without(ids: Ids, others: Ids, vocab: int) -> Ids:
    """Return the tokens among some that are not among others."""
    if not len(others):
        return ids
    is_other = np.zeros(vocab, dtype=np.bool_)
    is_other[others] = True
    return ids[~is_other[ids]]
