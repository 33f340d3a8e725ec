"""The fused distribution as weights that need not sum to one, for many rows at once.

Weights have the specification's ratios up to rounding. Every function says which of its decisions
are *sure*: no change of the weights by a share of `error` could turn them. The caller leaves the
others to the specification (``docs/algorithm.md#the-same-decisions-faster``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rapid.speculation.draw import Draw
from rapid.speculation.fast.philox import uniforms_on_device
from rapid.speculation.sampling import probabilities

if TYPE_CHECKING:
    from rapid.config import SamplingConfig, SpeculationConfig

_MARGIN = 2e-5  # relative error of a float32 softmax of small logits, of every weight above 1e-36
_ROUNDING = 5e-7  # of a few float32 operations, in shares of the largest number in them
_FINER = 1e-6  # errors in float64, in shares of those in float32
_NEAR = 200.0  # errors; finishes of a residual's race closer than that are not told apart
_MOST_ERROR = 1e-2  # relative; above it nothing is sure
_UNSEEN = 1e-36  # weights up to which float32 is coarser than its relative rounding
_LEAST_RATIO = 1e-15  # of a weight to its time in a race; a weight that is not seen stays below
_CLOSE = 1e-11  # logits over T whose probabilities may be one float64 number
_MOST_ETA = 300.0  # exp(2 * eta) must be a number in float64
_TRANSFERS = ("adaptive", "boost", "distill", "mixture")  # others the specification judges
_LEAST_SORTED = 1024  # tokens among which the filters' borders are looked for


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Positions to judge, all with the same settings, on one device."""

    logits: torch.Tensor  # the target's [rows, vocab]
    ids: torch.Tensor  # candidates of the proposals [rows, m]
    draft: torch.Tensor  # their probabilities, float64 [rows, m]
    is_real: torch.Tensor  # False for padding, which repeats the first candidate [rows, m]
    drafted: torch.Tensor  # the drafted tokens [rows]
    numbers: torch.Tensor  # uniform numbers that drafted tokens are accepted by [rows]
    keys: torch.Tensor  # keys of the noise of the token that is drawn [rows, 3]
    # The target's logits after the retrieved text [rows, vocab], if any.
    witness: torch.Tensor | None = None

    def draft_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return q of one token per row, 0 if it was not proposed [rows]."""
        return (self.draft * (self.is_real & (self.ids == tokens[:, None]))).sum(dim=-1)

    def at(self, rows: torch.Tensor) -> BlockRows:
        """Return some of the rows."""
        return BlockRows(
            self.logits[rows],
            self.ids[rows],
            self.draft[rows],
            self.is_real[rows],
            self.drafted[rows],
            self.numbers[rows],
            self.keys[rows],
            None if self.witness is None else self.witness[rows],
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """Distributions up to a factor: ``p_hat = weights / total``."""

    weights: torch.Tensor  # not below zero, float32, or float64 for filters [rows, vocab]
    total: torch.Tensor  # their sums, float64 [rows]
    error: torch.Tensor  # bounds of the relative errors of p_hat [rows]
    # Tokens at a filter's border, which it may keep or not [rows, vocab]; None without filters.
    doubtful: torch.Tensor | None = None

    @classmethod
    def of_probabilities(
        cls, probs: torch.Tensor, logits: torch.Tensor, temperature: float
    ) -> Weights:
        """Return the softmax of some logits as weights."""
        largest = logits.amax(dim=-1).abs().double() / temperature
        error = _MARGIN + _ROUNDING * largest
        if probs.dtype == torch.float64:
            error *= _FINER
        return cls(probs, torch.ones_like(largest), error)

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the weights of one token per row [rows]."""
        return self.weights.gather(-1, tokens[:, None])[:, 0].double()

    def at(self, rows: torch.Tensor) -> Weights:
        """Return some of the rows."""
        doubtful = None if self.doubtful is None else self.doubtful[rows]
        return Weights(self.weights[rows], self.total[rows], self.error[rows], doubtful)

    def is_doubtful(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return whether a filter may or may not keep one token per row [rows]."""
        if self.doubtful is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return self.doubtful.gather(-1, tokens[:, None])[:, 0]


@dataclass(frozen=True, slots=True)
class RowReadings:
    """What the two texts say about tokens, before filters; for the odds of `adaptive`."""

    # p, float64 under `adaptive`, whose odds need every bit, else float32 [rows, vocab].
    target: torch.Tensor
    # The target's own distribution on the retrieved text, float64 [rows, vocab], if any.
    retrieved: torch.Tensor | None

    def at(self, rows: torch.Tensor) -> RowReadings:
        """Return some of the rows."""
        retrieved = None if self.retrieved is None else self.retrieved[rows]
        return RowReadings(self.target[rows], retrieved)

    def of(self, rows: BlockRows, tokens: torch.Tensor) -> torch.Tensor:
        """Return p and q of one token per row [2, rows], with the mean of both readings as q."""
        told = rows.draft_of(tokens)
        if self.retrieved is not None:
            told = (told + self.retrieved.gather(-1, tokens[:, None])[:, 0]) / 2
        return torch.stack([self.target.gather(-1, tokens[:, None])[:, 0], told])


def is_within_reach(speculation: SpeculationConfig) -> bool:
    """Return whether rows can be judged by weights: not by `paper`, nor where all tokens move."""
    moves_all = speculation.transfer == "distill" and speculation.plausibility == 0
    return (
        speculation.rule == "exact"
        and speculation.transfer in _TRANSFERS
        and speculation.eta <= _MOST_ETA
        and not (moves_all and speculation.eta > 0)
    )


def read(rows: BlockRows, draw: Draw) -> RowReadings:
    """Return p, and the target's own reading of the retrieved text where its logits are there."""
    if not draw.speculation.is_witnessed:
        return RowReadings(softmax(rows.logits, draw), None)
    witness = rows.witness
    retrieved = None if witness is None else probabilities(witness, draw.temperature)
    return RowReadings(probabilities(rows.logits, draw.temperature), retrieved)


def softmax(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Return p in float32, or in float64 for filters, whose borders lie between close numbers."""
    temperature = draw.temperature
    if _is_filtered(draw.sampling, logits.shape[-1]):
        return probabilities(logits, temperature)
    probs = torch.softmax(logits if temperature == 1 else logits / temperature, dim=-1)
    # In float32, adding many small numbers to a large one would lose some.
    return probs.mul_(probs.sum(dim=-1, keepdim=True, dtype=torch.float64).reciprocal().float())


def _is_filtered(sampling: SamplingConfig, vocab: int) -> bool:
    return sampling.top_p < 1 or (sampling.top_k is not None and sampling.top_k < vocab)


def fuse_weights(
    rows: BlockRows,
    readings: RowReadings,
    draw: Draw,
    weight: torch.Tensor | None,
) -> Weights:
    """Return p_hat before filters, for every rule of `rapid.speculation.fusion.fuse_probs`.

    It may share the memory of `readings`. `weight` is that of the retrieved text's reading under
    `adaptive` [rows], else None.
    """
    target, speculation, eta = readings.target, draw.speculation, draw.speculation.eta
    if weight is not None:  # p is needed again, for the odds
        is_filtered = _is_filtered(draw.sampling, target.shape[-1])
        target = target.to(torch.float64 if is_filtered else torch.float32, copy=True)
    own = Weights.of_probabilities(target, rows.logits, draw.temperature)
    if eta == 0:
        return own
    if weight is not None:
        mixed = _mix(rows, readings, own, speculation, weight)
        error = own.error * (1 + eta / 20)  # of exp(eta * w * m) in float32
        if draw.is_greedy:  # sharpening does not change the order
            return Weights(mixed, own.total, error)
        sharpened = mixed * (eta * weight)[:, None].to(mixed.dtype)
        sharpened.exp_().mul_(mixed)
        return Weights(sharpened, sharpened.sum(dim=-1).double(), error)
    # Only proposed tokens are moved: their weights and the sum change, and nothing else of p.
    proposed = target.gather(-1, rows.ids).double()
    total, error = own.total, own.error
    if speculation.transfer == "mixture":
        moved = proposed + eta * rows.draft
        total = total + eta
    else:
        best = rows.draft.amax(dim=-1, keepdim=True)
        move = rows.draft - proposed
        if speculation.transfer == "boost":
            certainty = target.amax(dim=-1, keepdim=True)
            move = move.clamp(min=0) * 2 * best / (best + certainty)
        plausible = rows.draft >= speculation.plausibility * best
        moved = proposed * torch.exp(eta * move * plausible)
        change = (moved - proposed) * rows.is_real
        total = total + change.sum(dim=-1)
        error = error * (1 + 3 * eta)  # of the move, which has the error of p
        error = error * (1 + change.abs().sum(dim=-1) / total)  # little may be left of a sum
    own.weights.scatter_(-1, rows.ids, moved.to(target.dtype))
    return Weights(own.weights, total, error)


def _mix(
    rows: BlockRows,
    readings: RowReadings,
    own: Weights,
    speculation: SpeculationConfig,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Return the mixture m of `adaptive`, float32 [rows, vocab]; it takes the place of `own`."""
    target, retrieved, share = readings.target, readings.retrieved, weight[:, None]
    if retrieved is None:
        best = rows.draft.amax(dim=-1, keepdim=True)
        told = share * rows.draft * (rows.draft >= speculation.plausibility * best)
        mixed = own.weights.mul_(1 - share)
        at_proposed = (1 - share) * target.gather(-1, rows.ids) + told
        return mixed.scatter_(-1, rows.ids, at_proposed.to(mixed.dtype))
    told = retrieved / 2
    proposed = (retrieved.gather(-1, rows.ids) + rows.draft) / 2
    told.scatter_(-1, rows.ids, proposed)
    told *= told >= speculation.plausibility * told.amax(dim=-1, keepdim=True)
    return (target * (1 - share)).add_(told.mul_(share)).to(own.weights.dtype)


def filter_weights(
    fused: Weights, logits: torch.Tensor, sampling: SamplingConfig
) -> tuple[Weights, torch.Tensor]:
    """Return the weights that `filter_probs` keeps, and whether they are sure to be those [rows].

    Only the best tokens are sorted, by weight and then by id. Of two tokens with the same weight
    the lower id is kept if they also have the same logit; otherwise the row is not sure.
    """
    vocab = logits.shape[-1]
    sure = torch.isfinite(fused.total) & (fused.error < _MOST_ERROR)
    top_k = vocab if sampling.top_k is None else min(sampling.top_k, vocab)
    if not _is_filtered(sampling, vocab):
        return fused, sure
    size = min(vocab, _LEAST_SORTED if top_k >= vocab else max(_LEAST_SORTED, top_k + 1))
    best, order = fused.weights.topk(size)
    order, by_id = order.sort(dim=-1)
    best, by_weight = best.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, by_weight)
    best = best.double()
    kept = best.clone()
    kept[:, top_k:] = 0
    total = fused.total if top_k >= vocab else kept.sum(dim=-1)
    before = (kept.cumsum(dim=-1) - kept) / total[:, None]
    error = 2 * fused.error[:, None]
    is_kept = (kept > 0) & (before < sampling.top_p + error)
    doubtful = is_kept & (before > sampling.top_p - error)
    kept *= is_kept
    kept_total = kept.sum(dim=-1)
    # Tokens in doubt that weigh next to nothing are kept, and a row that draws one is not sure.
    sure &= (kept * doubtful).sum(dim=-1) <= fused.error * kept_total
    num_kept = is_kept.sum(dim=-1, keepdim=True)
    last, following = (num_kept - 1).clamp(min=0), num_kept.clamp(max=size - 1)
    if size < vocab:
        sure &= (num_kept < size)[:, 0]
    lowest_kept = best.gather(-1, last)
    highest_cut = torch.where(num_kept < size, best.gather(-1, following), 0)
    is_tie = (lowest_kept == highest_cut) & (
        logits.gather(-1, order.gather(-1, last)) == logits.gather(-1, order.gather(-1, following))
    )
    if size < vocab:
        is_tie &= highest_cut > best[:, -1:]  # or there may be more of them, with lower ids
    sure &= (is_tie | (highest_cut < lowest_kept * (1 - error)))[:, 0]
    weights = torch.zeros_like(fused.weights).scatter_(-1, order, kept.to(fused.weights.dtype))
    at_border = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order, doubtful)
    return Weights(weights, kept_total, 2 * fused.error, at_border), sure


def best_of(fused: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best token of each row, and whether it is sure to be the best [rows]."""
    tokens, best, is_alone = _peak(fused.weights, share=4 * fused.error)
    return tokens, is_alone & torch.isfinite(best) & (fused.error < _MOST_ERROR)


def best_logit(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest logit's token of each row [rows, vocab], and whether p has it alone."""
    tokens, best, is_alone = _peak(logits, width=_CLOSE * temperature)
    return tokens, is_alone & torch.isfinite(best)


def race_rows(
    weights: Weights, keys: torch.Tensor, tolerance: torch.Tensor | float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token of each row by the race of `rapid.speculation.noise.race`, by keys [rows, 3].

    Return the tokens, and whether they are sure [rows]: not where two ratios are as close as the
    relative `tolerance`, beside what the weights' errors ask for.
    """
    times = uniforms_on_device(keys, weights.weights.shape[-1]).log_().neg_()
    times = times.to(weights.weights.dtype)
    share = tolerance + 4 * weights.error
    tokens, best, is_alone = _peak(times.reciprocal_().mul_(weights.weights), share=share)
    is_alone &= torch.isfinite(weights.total) & torch.isfinite(best) & (best > _LEAST_RATIO)
    return tokens, is_alone & ~weights.is_doubtful(tokens)


def accept_rows(rows: BlockRows, fused: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether the drafted tokens are accepted by p_hat, and whether that is sure [rows]."""
    drafted = fused.total * rows.draft_of(rows.drafted)
    chance = fused.of(rows.drafted) / drafted
    slack = 4 * fused.error * chance + _UNSEEN / drafted
    sure = torch.isfinite(chance) & ((rows.numbers - chance).abs() > slack)
    return rows.numbers < chance, sure & ~fused.is_doubtful(rows.drafted)


def correct_rows(rows: BlockRows, fused: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token of each row from what p_hat has more than q, and say if it is sure [rows].

    It takes the place of `fused`.
    """
    # A difference of close numbers is taken too high by what it may be wrong: its token wins rather
    # too early, and then the row is not sure.
    proposed = fused.weights.gather(-1, rows.ids).double()
    wanted = fused.total[:, None] * rows.draft
    slack = 2 * fused.error[:, None] * (proposed + wanted)
    excess = torch.where(proposed > 0, (proposed - wanted).clamp(min=0) + slack, 0)
    fused.weights.scatter_(-1, rows.ids, excess.to(fused.weights.dtype))
    tokens, sure = race_rows(fused, rows.keys, _NEAR * fused.error)
    share = (slack / excess * (rows.ids == tokens[:, None])).nan_to_num(posinf=1.0).amax(dim=-1)
    return tokens, sure & (2 * share < _NEAR * fused.error)


def _peak(
    values: torch.Tensor, *, share: torch.Tensor | None = None, width: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where each row is highest, how high, and whether no other value comes close [rows].

    Close is within `share` of the highest [rows], or else within the distance `width`.
    """
    best, tokens = values.max(dim=-1)
    least = best - width if share is None else best * (1 - share)
    is_alone = (values >= least.to(values.dtype)[:, None]).sum(dim=-1) == 1
    return tokens, best, is_alone
