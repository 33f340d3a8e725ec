"""The rule: which drafted tokens stay, and what stands in for the first that does not.

A block's positions are judged left to right. Under `maximal` coupling a drafted token x is kept
with probability ``min(1, p_hat(x) / q(x))``, else the token is drawn from the residual
``norm(max(p_hat - q, 0))``: standard speculative sampling (Leviathan et al. 2023; Chen et al. 2023)
with p_hat in the place of p, so each position follows p_hat exactly. Under `shared_noise` the
result is the winner of p_hat's race on the noise the drafter used for q's; greedy takes the best
token of p_hat. Both keep the draft exactly when it is that token. There is no bonus token: every
committed position was offered by the drafter and went through this rule.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import torch

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.messages import DraftBlock, Float32Array, Int32Array, TokenLogprobs, Verdict
from rapid.speculation.fusion import fused_probs
from rapid.speculation.noise import Float64Array, Purpose, race, uniforms
from rapid.speculation.sampling import distribution_temperature, filter_probs, probabilities


@dataclass(frozen=True, slots=True)
class Judgement:
    """The committed tokens of one block; the first `num_accepted` of them were drafted."""

    token_ids: tuple[int, ...]
    num_accepted: int
    is_finished: bool
    logprobs: tuple[TokenLogprobs, ...] = ()

    def verdict(self, block: DraftBlock, verify_ms: float = 0.0) -> Verdict:
        """The judgement as the message that answers `block`."""
        return Verdict(
            lease_id=block.lease_id,
            choice=block.choice,
            position=block.position,
            token_ids=self.token_ids,
            num_drafted=len(block),
            num_accepted=self.num_accepted,
            is_finished=self.is_finished,
            logprobs=self.logprobs,
            draft_ms=block.draft_ms,
            verify_ms=verify_ms,
        )


def acceptance_probs(fused: Float64Array, draft: Float64Array) -> Float64Array:
    """``min(1, p_hat / q)`` per token [vocab]; 1 where q is zero (never offered)."""
    ratio = np.ones_like(fused)
    np.divide(fused, draft, out=ratio, where=draft > 0)
    return np.minimum(ratio, 1.0)


def residual(fused: Float64Array, draft: Float64Array) -> Float64Array:
    """``norm(max(p_hat - q, 0))`` [vocab]; p_hat itself when the two coincide numerically.

    A rejection has probability ``sum(max(q - p_hat, 0))``, which is the residual's mass, so the
    fallback is reached only through rounding.
    """
    excess = np.maximum(fused - draft, 0.0)
    mass = excess.sum()
    if mass <= 0:
        return fused
    normalised: Float64Array = excess / mass
    return normalised


def propose(
    candidate_ids: Int32Array,
    candidate_probs: Float32Array,
    sampling: SamplingConfig,
    speculation: SpeculationConfig,
    choice: int,
    position: int,
) -> int:
    """Draw one draft token from exactly the proposal that is sent (greedy: its best token).

    Args:
        candidate_ids: tokens with non-zero probability, best first [m].
        candidate_probs: their probabilities [m].
    """
    if sampling.temperature == 0:
        return int(candidate_ids[candidate_probs.argmax()])
    shared = speculation.coupling == "shared_noise"
    purpose = Purpose.RESULT if shared else Purpose.DRAFT
    noise = uniforms(sampling.seed, choice, position, purpose, int(candidate_ids.max()) + 1)
    return int(candidate_ids[race(candidate_probs.astype(np.float64), noise[candidate_ids])])


def judge(
    block: DraftBlock,
    logits: torch.Tensor,
    sampling: SamplingConfig,
    speculation: SpeculationConfig,
    eos_ids: Set[int],
    num_logprobs: int | None = None,
) -> Judgement:
    """Judge a block against the target's logits of its positions.

    An empty block proposed nothing: its one row commits a token of the target's own distribution.

    Args:
        block: k drafted tokens with their proposals.
        logits: the target's rows for the same positions, on any device [max(k, 1), vocab].
        eos_ids: tokens that end the answer; rows after one are ignored.
        num_logprobs: None for none; alternatives beside each committed token otherwise.
    """
    if not len(block):
        token, own = decode_token(
            logits[0], sampling, speculation, block.choice, block.position, num_logprobs
        )
        return Judgement((token,), 0, token in eos_ids, () if own is None else (own,))
    draft = _dense(block, logits)
    unfiltered = fused_probs(
        logits,
        draft,
        temperature=distribution_temperature(sampling, speculation),
        transfer=speculation.transfer,
        eta=speculation.eta,
        plausibility=speculation.plausibility,
    )
    fused = _to_numpy(filter_probs(unfiltered, sampling.top_k, sampling.top_p))
    draft_rows = _to_numpy(draft)
    token_ids: list[int] = []
    num_accepted = 0
    is_finished = False
    for row, drafted in enumerate(block.token_ids.tolist()):
        token, accepted = _settle(
            drafted,
            fused[row],
            draft_rows[row],
            sampling,
            speculation,
            block.choice,
            block.position + row,
        )
        token_ids.append(token)
        num_accepted += accepted
        is_finished = token in eos_ids
        if not accepted or is_finished:
            break
    logprobs: tuple[TokenLogprobs, ...] = ()
    if num_logprobs is not None:
        logprobs = tuple(
            _logprobs(unfiltered[row], token, num_logprobs) for row, token in enumerate(token_ids)
        )
    return Judgement(tuple(token_ids), num_accepted, is_finished, logprobs)


def decode_token(
    logits: torch.Tensor,
    sampling: SamplingConfig,
    speculation: SpeculationConfig,
    choice: int,
    position: int,
    num_logprobs: int | None = None,
) -> tuple[int, TokenLogprobs | None]:
    """One token of the model's own distribution, without a drafter: what `plain` and `rag` commit.

    Under `shared_noise` it is the token that a block judged with eta = 0 commits at this position.

    Args:
        logits: one row [vocab].
    """
    probs = probabilities(logits, distribution_temperature(sampling, speculation))
    if sampling.temperature == 0:
        token = int(logits.argmax())
    else:
        kept = _to_numpy(filter_probs(probs, sampling.top_k, sampling.top_p))
        token = race(kept, uniforms(sampling.seed, choice, position, Purpose.RESULT, len(kept)))
    return token, None if num_logprobs is None else _logprobs(probs, token, num_logprobs)


def _settle(
    drafted: int,
    fused: Float64Array,
    draft: Float64Array,
    sampling: SamplingConfig,
    speculation: SpeculationConfig,
    choice: int,
    position: int,
) -> tuple[int, bool]:
    """The committed token of one position, and whether the drafted one was kept."""
    if sampling.temperature == 0:
        token = int(fused.argmax())
        return token, token == drafted

    def noise(purpose: Purpose, count: int = len(fused)) -> Float64Array:
        return uniforms(sampling.seed, choice, position, purpose, count)

    if speculation.coupling == "shared_noise":
        token = race(fused, noise(Purpose.RESULT))
        return token, token == drafted
    if noise(Purpose.ACCEPT, 1)[0] * draft[drafted] < fused[drafted]:
        return drafted, True
    return race(residual(fused, draft), noise(Purpose.RESIDUAL)), False


def _dense(block: DraftBlock, logits: torch.Tensor) -> torch.Tensor:
    """The block's proposals over the whole vocabulary, float64 [k, vocab]; padding adds zero."""
    ids = torch.as_tensor(block.candidate_ids.astype(np.int64), device=logits.device)
    probs = torch.as_tensor(block.candidate_probs.astype(np.float64), device=logits.device)
    dense = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    return dense.scatter_add_(-1, ids.clamp(min=0), probs)


def _to_numpy(probs: torch.Tensor) -> Float64Array:
    array: Float64Array = probs.cpu().numpy()
    return array


def _logprobs(probs: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    logprobs = probs.log()
    best, ids = logprobs.topk(count) if count else (logprobs[:0], logprobs[:0].long())
    top = tuple(zip(ids.tolist(), best.tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), top)
