"""Judging of blocks by weights: what `rapid.speculation.acceptance.judge` says, in less time.

The positions of one or several blocks are decided together, as if every draft before them were
accepted. Then the decisions are taken one by one, up to a rejection. The first that is not sure,
and all after it, are left to the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from rapid.speculation import weights as fast
from rapid.speculation.acceptance import Judgement
from rapid.speculation.draw import Draw
from rapid.speculation.fusion import observed, weights_if_accepted
from rapid.speculation.noise import Float64Array, Purpose
from rapid.speculation.philox import keys_of, uniforms_at
from rapid.speculation.questions import ToJudge
from rapid.speculation.weights import Rows

_MOST_CANDIDATES = 1024  # of a proposal; with more there is little of a row to leave out


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What is decided about a position; the probabilities are for the odds of `adaptive`."""

    token: int
    is_accepted: bool
    is_sure: bool
    target_prob: float
    told_prob: float


def is_within_reach(question: ToJudge) -> bool:
    """Return whether a block can be judged by weights."""
    block = question.block
    if not len(block) or question.num_logprobs is not None:
        return False
    ids = np.sort(block.candidate_ids, axis=-1)
    is_twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    return (
        ids.shape[1] <= _MOST_CANDIDATES
        and bool((block.candidate_ids[:, 0] >= 0).all() and not is_twice.any())
        and fast.is_within_reach(question.draw.speculation)
    )


def judged_by_rows(question: ToJudge) -> Judgement:
    """Judge a block row by row up to the first rejection; `is_within_reach` must hold."""
    return _judgement(question, _outcomes_in_turn(question))


def decided_together(questions: Sequence[ToJudge]) -> torch.Tensor:
    """Return all that `judged_together` needs from the device, as float64 in one dimension.

    Args:
        questions: Blocks with the same settings, for all of which `is_within_reach` holds.
    """
    lengths = [len(question.block) for question in questions]
    draws = [
        question.draw.after(row) for question in questions for row in range(len(question.block))
    ]
    log_odds = [question.log_odds for question in questions]
    decided, instead = _decided(_rows(questions), draws, lengths, log_odds)
    return torch.cat([decided.flatten(), instead.flatten()])


def judged_together(
    questions: Sequence[ToJudge], decided: Float64Array
) -> list[Callable[[], Judgement]]:
    """Return the judging of each block by what `decided_together` returned, brought to the host.

    Each may raise what the specification raises.
    """
    lengths = [len(question.block) for question in questions]
    drafted = decided[: 5 * sum(lengths)].reshape(5, -1).T
    instead = decided[5 * sum(lengths) :].reshape(5, -1).T
    parts = np.split(drafted, np.cumsum(lengths)[:-1])
    return [
        partial(_judgement, question, _outcomes(rows, correction, question.draw))
        for question, rows, correction in zip(questions, parts, instead, strict=True)
    ]


def _judgement(question: ToJudge, outcomes: Iterable[_Outcome]) -> Judgement:
    """Commit outcomes up to a rejection; from one that is not sure on, ask the specification."""
    token_ids: list[int] = []
    num_accepted, log_odds = 0, question.log_odds
    for outcome in outcomes:
        if not outcome.is_sure:
            break
        token_ids.append(outcome.token)
        if question.draw.speculation.is_witnessed:
            log_odds = observed(log_odds, outcome.target_prob, outcome.told_prob)
        num_accepted += outcome.is_accepted
        is_finished = outcome.token in question.eos_ids
        if not outcome.is_accepted or is_finished or len(token_ids) == len(question.logits):
            return Judgement(tuple(token_ids), num_accepted, is_finished, log_odds=log_odds)
    rest = question.by_specification(len(token_ids), log_odds)
    return replace(
        rest,
        token_ids=(*token_ids, *rest.token_ids),
        num_accepted=num_accepted + rest.num_accepted,
    )


def _outcomes(rows: Float64Array, correction: Float64Array, draw: Draw) -> Iterator[_Outcome]:
    """Yield the outcomes of a block's rows [k, 5], with the correction [5] for a rejected one."""
    for row in rows:
        is_accepted = bool(row[1])
        values = row if is_accepted or not (row[2] and _has_residual(draw)) else correction
        yield _Outcome(
            int(values[0]), is_accepted, bool(values[2]), float(values[3]), float(values[4])
        )


def _outcomes_in_turn(question: ToJudge) -> Iterator[_Outcome]:
    """Yield the outcomes of a block, computing each row as it is asked for."""
    log_odds = question.log_odds
    for row in range(len(question.block)):
        draws = [question.draw.after(row)]
        decided, instead = _decided(_rows([question], row), draws, [1], [log_odds])
        (outcome,) = _outcomes(decided.T.numpy(), instead[:, 0].numpy(), question.draw)
        if question.draw.speculation.is_witnessed:
            log_odds = observed(log_odds, outcome.target_prob, outcome.told_prob)
        yield outcome


def _rows(questions: Sequence[ToJudge], only: int | None = None) -> Rows:
    """Return the rows of blocks, or one row of each, on the device of their logits."""
    which = slice(None) if only is None else slice(only, only + 1)
    logits = [question.logits[: len(question.block)][which] for question in questions]
    ids = [question.block.candidate_ids[which] for question in questions]
    probs = [question.block.candidate_probs[which] for question in questions]
    drafted = [question.block.token_ids[which] for question in questions]
    witnesses = [
        question.witness[: len(question.block)][which]
        for question in questions
        if question.witness is not None
    ]
    device, width = logits[0].device, max(array.shape[1] for array in ids)
    padded_ids, padded_probs = (
        np.concatenate(
            [
                np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=pad)
                for array in of
            ]
        )
        for of, pad in ((ids, -1), (probs, 0))
    )
    candidate_ids = torch.as_tensor(padded_ids.astype(np.int64), device=device)
    draft = torch.as_tensor(padded_probs.astype(np.float64), device=device)
    draft /= draft.sum(dim=-1, keepdim=True)
    is_real = candidate_ids >= 0
    return Rows(
        _stacked(logits),
        torch.where(is_real, candidate_ids, candidate_ids[:, :1]),
        torch.where(is_real, draft, draft[:, :1]),
        is_real,
        torch.as_tensor(np.concatenate(drafted).astype(np.int64), device=device),
        _stacked(witnesses) if witnesses and questions[0].draw.speculation.is_witnessed else None,
    )


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _decided(
    rows: Rows, draws: Sequence[Draw], lengths: Sequence[int], log_odds: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide all positions of some blocks, each as if the drafts before it were accepted.

    Args:
        rows: The positions of all blocks.
        draws: Those of the positions, with the same settings.
        lengths: Numbers of positions [blocks].
        log_odds: Those before each block [blocks].

    Returns:
        Token, whether it was accepted, whether that is sure, p and q of the token [5, rows]. And
        likewise the token in place of the first rejected one of each block [5, blocks], without
        meaning where nothing is drawn from a residual.
    """
    draw, is_witnessed = draws[0], draws[0].speculation.is_witnessed
    none = rows.draft.new_zeros((5, len(lengths)))
    unread = rows.draft.new_zeros((2, len(draws)))
    if draw.is_greedy and draw.speculation.eta == 0:
        tokens, sure = fast.best_logit(rows.logits, draw.temperature)
        return _table(tokens, tokens == rows.drafted, sure, unread), none
    readings = fast.read(rows, draw.temperature)
    weights = None
    if is_witnessed:
        drafted = readings.of(rows, rows.drafted)
        weights = weights_if_accepted(log_odds, lengths, drafted)
    fused = fast.fused_weights(rows, readings, draw, weights)
    fused, are_kept = fast.filtered(fused, rows.logits, draw.sampling)
    if not _has_residual(draw):
        if draw.is_greedy:
            tokens, sure = fast.best_of(fused)
        else:
            tokens, sure = fast.raced(fused, _keys(draws, Purpose.RESULT, rows))
        probs = readings.of(rows, tokens) if is_witnessed else unread
        return _table(tokens, tokens == rows.drafted, sure & are_kept, probs), none
    keys = keys_of(draws, Purpose.ACCEPT)
    numbers = torch.as_tensor(uniforms_at(keys, np.zeros((len(draws), 1), dtype=np.int64))[:, 0])
    accepted, sure = fast.accepted(rows, fused, numbers.to(rows.logits.device))
    probs = drafted if is_witnessed else unread
    decided = _table(rows.drafted, accepted, sure & are_kept, probs)
    if accepted.device.type == "cpu" and accepted.all():  # elsewhere asking would be a transfer
        return decided, none
    keys_there = _keys(draws, Purpose.RESIDUAL, rows)
    if len(draws) > 1:
        first = _first_rejected(accepted, lengths)
        rows, readings = rows.at(first), readings.at(first)
        fused, are_kept, keys_there = fused.at(first), are_kept[first], keys_there[first]
    tokens, sure = fast.corrected(rows, fused, keys_there)
    probs = readings.of(rows, tokens) if is_witnessed else unread[:, : len(lengths)]
    return decided, _table(tokens, torch.zeros_like(sure), sure & are_kept, probs)


def _has_residual(draw: Draw) -> bool:
    """Return whether a rejected token is replaced by one that is drawn from a residual."""
    return not draw.is_greedy and draw.speculation.coupling == "maximal"


def _first_rejected(accepted: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the first rejected row of each block, or its last row [blocks]."""
    device, last = accepted.device, np.cumsum(lengths) - 1
    last_of_blocks = torch.as_tensor(last, device=device)
    last_of_rows = torch.as_tensor(np.repeat(last, lengths), device=device)
    blocks = torch.as_tensor(np.repeat(np.arange(len(lengths)), lengths), device=device)
    rows = torch.arange(len(accepted), device=device)
    rejected = torch.where(accepted, last_of_rows, rows)
    return last_of_blocks.scatter_reduce(0, blocks, rejected, "amin")


def _keys(draws: Sequence[Draw], purpose: Purpose, rows: Rows) -> torch.Tensor:
    return torch.as_tensor(keys_of(draws, purpose), device=rows.logits.device)


def _table(
    tokens: torch.Tensor, accepted: torch.Tensor, sure: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    return torch.cat([torch.stack([tokens, accepted, sure]).double(), probs])
