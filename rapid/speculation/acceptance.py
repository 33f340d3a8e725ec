"""Verification of draft blocks: which tokens are accepted, and what replaces the first rejected.

p is the target's distribution at a position, q the proposal that the drafter drew from, and p_hat
the fused distribution that the answer follows (`rapid.speculation.fusion`; with eta = 0 it is p).
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from rapid.messages import DraftBlock, Float32Array, Int32Array, TokenLogprobs, Verdict
from rapid.receipt import TokenProbs
from rapid.speculation.draw import Draw
from rapid.speculation.fusion import fuse_probs, update_log_odds
from rapid.speculation.noise import Float64Array, Purpose, accepts, race
from rapid.speculation.sampling import best_token, filter_probs, probabilities

if TYPE_CHECKING:
    from rapid.config import SpeculationConfig

_SURE = 0.1  # the reference's evaluation script: assistant_confidence_threshold


@dataclass(frozen=True, slots=True)
class Judgement:
    """The committed tokens of one block, of which the first `num_accepted` were drafted."""

    token_ids: tuple[int, ...]
    num_accepted: int
    is_finished: bool
    logprobs: tuple[TokenLogprobs, ...] = ()
    log_odds: float = 0.0  # what the next block of the answer is judged with under `adaptive`
    # How many of the tokens this module decided, and no faster form of it.
    num_specified: int = field(default=0, compare=False)
    probs: tuple[TokenProbs, ...] = ()  # of each token, if they were asked for

    def verdict(self, block: DraftBlock, verify_ms: float = 0.0) -> Verdict:
        """Return the judgement as the message that answers `block`."""
        return Verdict(
            lease_id=block.lease_id,
            choice=block.choice,
            position=block.position,
            token_ids=self.token_ids,
            num_drafted=len(block),
            num_accepted=self.num_accepted,
            is_finished=self.is_finished,
            logprobs=self.logprobs,
            log_odds=self.log_odds,
            draft_ms=block.draft_ms,
            verify_ms=verify_ms,
            num_forced=block.num_forced,
            probs=self.probs,
        )


@dataclass(frozen=True, slots=True)
class _Distributions:
    """The distributions that one position is judged by, each [vocab]."""

    draft: torch.Tensor  # q, the proposal that the drafted token was drawn from
    fused: torch.Tensor  # p_hat, which the acceptance test compares with q
    # The distribution that the residual of a rejection is taken from: p_hat, and p under the rule
    # `paper`.
    wanted: torch.Tensor
    # The distribution that log-probabilities describe: p_hat, and p under the rule `paper`, before
    # the request's filters.
    unfiltered: torch.Tensor

    def of(self, token: int, target: torch.Tensor) -> TokenProbs:
        """Return the probabilities of a token, given p before filters [vocab]."""
        followed = self.unfiltered if self.wanted is self.fused else self.fused
        return TokenProbs(*(float(probs[token]) for probs in (target, self.draft, followed)))


def acceptance_probability(fused: float, draft: float) -> float:
    """Return ``min(1, p_hat(x) / q(x))`` for a drafted token x."""
    return 1.0 if fused >= draft else fused / draft


def residual(wanted: Float64Array, kept: Float64Array) -> Float64Array:
    """Return ``norm(max(wanted - kept, 0))`` [vocab], or `wanted` if that has no mass.

    `kept` is ``min(q, p_hat)``. For p_hat it is the residual of speculative sampling,
    ``norm(max(p_hat - q, 0))``, and for p the paper's ``norm(max(p - q, p - p_hat, 0))``.
    """
    excess = np.maximum(wanted - kept, 0.0)
    mass = excess.sum()
    # Rounding alone leads there: the mass is the probability of a rejection.
    if mass <= 0:
        return wanted
    normalised: Float64Array = excess / mass
    return normalised


def propose(candidate_ids: Int32Array, candidate_probs: Float32Array, draw: Draw) -> int:
    """Draw a token from a proposal, ids and probabilities [m] as sent; greedy takes the best."""
    if draw.is_greedy:
        return int(candidate_ids[candidate_probs.argmax()])
    noise = draw.noise(draft_purpose(draw), int(candidate_ids.max()) + 1)
    return int(candidate_ids[race(candidate_probs.astype(np.float64), noise[candidate_ids])])


def draft_purpose(draw: Draw) -> Purpose:
    """Return the purpose of the numbers that a drafted token is drawn with."""
    shared = draw.speculation.coupling == "shared_noise"
    purpose = Purpose.RESULT if shared else Purpose.DRAFT
    return purpose


def ends_block(
    token: int,
    candidate_ids: Int32Array,
    candidate_probs: Float32Array,
    speculation: SpeculationConfig,
) -> bool:
    """Return whether drafting stops after this token.

    Under `paper` it does where the drafter gave the token, which is still judged, less than 0.1.
    """
    if speculation.rule == "exact":
        return False
    return bool(candidate_probs[candidate_ids == token][0] < _SURE)


def num_rows(num_drafted: int, num_left: int, speculation: SpeculationConfig) -> int:
    """Return the rows of target logits that a block needs, with `num_left` tokens yet to generate.

    It is one for each drafted token, at least one, and one more where `paper`'s bonus token fits.
    """
    has_bonus = speculation.rule == "paper" and num_drafted < num_left
    return max(num_drafted + has_bonus, 1)


def judge(
    block: DraftBlock,
    logits: torch.Tensor,
    draw: Draw,
    eos_ids: Set[int],
    num_logprobs: int | None = None,
    log_odds: float = 0.0,
    witness: torch.Tensor | None = None,
    *,
    explains: bool = False,
) -> Judgement:
    """Decide which tokens of a block are accepted, given the target's logits for its positions.

    Positions are judged left to right, and every committed one was drafted. If all are accepted and
    `logits` has a further row, one more token is drawn from the target's own distribution: the
    bonus token of `paper`, or the only token of an empty block.

    Args:
        block: k drafted tokens with their proposals.
        logits: The target's, as many rows as `num_rows` returns, on any device [rows, vocab].
        draw: Sampling settings, and the position of the block's first token.
        eos_ids: Tokens that end the answer; rows after one are ignored.
        num_logprobs: Number of alternatives beside each committed token; None for no
            log-probabilities.
        log_odds: Those of the verdict before, or 0 for the first block of an answer.
        witness: The target's logits after the retrieved text in place of the document, on the
            device of `logits` [at least k, vocab]. `adaptive` takes the mean of their
            distribution and the proposal for what the retrieved text says.
        explains: Whether the judgement says how likely its tokens were.

    Raises:
        EngineFailed: The logits contain NaN or +inf.
    """
    further = logits[len(block) :]
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    probs: list[TokenProbs] = []
    num_accepted = 0
    is_finished = False
    adapts = draw.speculation.is_witnessed  # otherwise no row pays for the odds
    for row, drafted in enumerate(block.token_ids.tolist()):
        # Going row by row stops at the first rejection and keeps a row's float64 in the CPU cache.
        draft = _dense(block, row, logits[row])
        told = draft
        if witness is not None and adapts:
            told = (draft + probabilities(witness[row], draw.temperature)) / 2
        distributions = _distributions(logits[row], draft, told, draw, log_odds)
        token, accepted = _settle(drafted, distributions, draw.after(row))
        token_ids.append(token)
        if adapts or explains:
            target = probabilities(logits[row], draw.temperature)
        if explains:
            probs.append(distributions.of(token, target))
        if adapts:
            log_odds = update_log_odds(log_odds, float(target[token]), float(told[token]))
        if num_logprobs is not None:
            logprobs.append(_logprobs(distributions.unfiltered, token, num_logprobs))
        num_accepted += accepted
        is_finished = token in eos_ids
        if not accepted or is_finished:
            break
    if len(further) and num_accepted == len(block) and not is_finished:
        token, entry = decode_token(further[0], draw.after(len(block)), num_logprobs)
        token_ids.append(token)
        logprobs += [entry] if entry else []
        probs += [own_probs(further[0], token, draw)] if explains else []
        is_finished = token in eos_ids
    return Judgement(
        tuple(token_ids),
        num_accepted,
        is_finished,
        tuple(logprobs),
        log_odds,
        len(token_ids),
        tuple(probs),
    )


def own_probs(logits: torch.Tensor, token: int, draw: Draw) -> TokenProbs:
    """Return the probabilities of a token that the model wrote alone, given its row [vocab]."""
    prob = float(probabilities(logits, draw.temperature)[token])
    return TokenProbs(target=prob, sampled=prob)


def decode_token(
    logits: torch.Tensor, draw: Draw, num_logprobs: int | None = None
) -> tuple[int, TokenLogprobs | None]:
    """Draw one token of the model's own distribution, given a row of logits [vocab].

    The modes `plain` and `rag` commit it, with its log-probabilities if `num_logprobs` asks for
    them; under `shared_noise`, so does a block that is judged with eta = 0.

    Raises:
        EngineFailed: The logits contain NaN or +inf.
    """
    if draw.is_greedy and num_logprobs is None:
        return best_token(logits), None
    probs = probabilities(logits, draw.temperature)
    if draw.is_greedy:
        token = best_token(logits)
    else:
        kept = _to_numpy(filter_probs(probs, *draw.filters))
        token = race(kept, draw.noise(Purpose.RESULT, len(kept)))
    return token, None if num_logprobs is None else _logprobs(probs, token, num_logprobs)


def _distributions(
    logits: torch.Tensor, draft: torch.Tensor, told: torch.Tensor, draw: Draw, log_odds: float
) -> _Distributions:
    """Return what a position is judged by; `told`, q or its mean with the witness, moves p."""
    speculation, temperature = draw.speculation, draw.temperature

    def fuse(logits: torch.Tensor) -> torch.Tensor:
        return fuse_probs(
            logits,
            told,
            temperature=temperature,
            transfer=speculation.transfer,
            eta=speculation.eta,
            plausibility=speculation.plausibility,
            log_odds=log_odds,
        )

    if speculation.rule == "exact":
        unfiltered = fuse(logits)
        fused = filter_probs(unfiltered, *draw.filters)
        return _Distributions(draft, fused, wanted=fused, unfiltered=unfiltered)
    # `paper` filters p before it is fused, and takes the residual of p, as the reference code does.
    target = probabilities(logits, temperature)
    kept = filter_probs(target, *draw.filters)
    if kept is not target:
        logits = logits.masked_fill(kept == 0, -torch.inf)
    return _Distributions(draft, fuse(logits), wanted=kept, unfiltered=target)


def _settle(drafted: int, distributions: _Distributions, draw: Draw) -> tuple[int, bool]:
    """Return the committed token of one position, and whether the drafted one was accepted."""
    # A whole row is copied to the host only to draw from it.
    draft, fused = distributions.draft, distributions.fused
    if draw.is_greedy:
        token = best_token(fused)
        return token, token == drafted
    if draw.speculation.coupling == "shared_noise":
        token = race(_to_numpy(fused), draw.noise(Purpose.RESULT, len(fused)))
        return token, token == drafted
    # `maximal`: speculative sampling (Leviathan et al. 2023; Chen et al. 2023) with p_hat for p, so
    # each position follows p_hat. Its random decisions are calls of `accepts` and `race`, in
    # whose place the tests of exactness take every branch in turn.
    chance = acceptance_probability(float(fused[drafted]), float(draft[drafted]))
    if accepts(chance, draw.noise(Purpose.ACCEPT, 1)[0]):
        return drafted, True
    kept = torch.minimum(draft, fused)
    lacking = residual(_to_numpy(distributions.wanted), _to_numpy(kept))
    return race(lacking, draw.noise(Purpose.RESIDUAL, len(lacking))), False


def _dense(block: DraftBlock, row: int, logits: torch.Tensor) -> torch.Tensor:
    """Return a position's proposal over the whole vocabulary, float64 [vocab]; padding adds 0."""
    ids = torch.as_tensor(block.candidate_ids[row].astype(np.int64), device=logits.device)
    probs = torch.as_tensor(block.candidate_probs[row].astype(np.float64), device=logits.device)
    # Made in float32, where it sums to one within 1e-7.
    probs /= probs.sum()
    dense = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    return dense.scatter_add_(-1, ids.clamp(min=0), probs)


def _to_numpy(probs: torch.Tensor) -> Float64Array:
    array: Float64Array = probs.cpu().numpy()
    return array


def _logprobs(probs: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    logprobs = probs.log()
    best, ids = logprobs.topk(count) if count else (logprobs[:0], logprobs[:0].long())
    # Tokens that a grammar forbids are no alternatives.
    top = tuple(
        pair for pair in zip(ids.tolist(), best.tolist(), strict=True) if math.isfinite(pair[1])
    )
    return TokenLogprobs(token, float(logprobs[token]), top)
