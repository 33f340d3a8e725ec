"""Judging of blocks by weights: what `rapid.speculation.acceptance.judge` says, in less time.

From the first decision that is not sure on, the specification judges the rest of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from rapid.messages import DraftBlock
from rapid.speculation.acceptance import Judgement
from rapid.speculation.draw import Draw
from rapid.speculation.fast import contenders
from rapid.speculation.fast import weights as fast
from rapid.speculation.fast.philox import keys_of, uniforms_at
from rapid.speculation.fast.weights import BlockRows
from rapid.speculation.fusion import update_log_odds, weights_if_accepted
from rapid.speculation.noise import Float64Array, Purpose
from rapid.speculation.questions import ToJudge

_MOST_CANDIDATES = 1024  # of a proposal; with more there is little of a row to leave out


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


def judge_by_rows(question: ToJudge) -> Judgement:
    """Judge a block on a CPU up to the first rejection; `is_within_reach` must hold."""
    block, draw, log_odds = question.block, question.draw, question.log_odds
    all_ids = block.candidate_ids.astype(np.int64)
    probs = block.candidate_probs.astype(np.float64)
    token_ids: list[int] = []
    for row, drafted in enumerate(block.token_ids.tolist()):
        is_real = all_ids[row] >= 0
        draft = (probs[row] / float(torch.from_numpy(probs[row]).sum()))[is_real]
        outcome = contenders.decide(
            question.logits[row],
            all_ids[row][is_real],
            draft,
            drafted,
            draw.after(row),
            log_odds,
            None if question.witness is None else question.witness[row],
        )
        token, is_accepted = outcome.token, outcome.is_accepted
        if not outcome.is_sure:
            alone = question.by_specification(row, log_odds, num_rows=1)
            token, is_accepted = alone.token_ids[0], alone.num_accepted == 1
            log_odds = alone.log_odds
        elif draw.speculation.is_witnessed:
            log_odds = update_log_odds(log_odds, outcome.target_prob, outcome.told_prob)
        token_ids.append(token)
        is_finished = token in question.eos_ids
        if not is_accepted or is_finished or len(token_ids) == len(question.logits):
            num_accepted = row + is_accepted
            return Judgement(tuple(token_ids), num_accepted, is_finished, log_odds=log_odds)
    return _continue(question, token_ids, len(block), log_odds)


def decide_together(questions: Sequence[ToJudge]) -> torch.Tensor:
    """Return what `judge_together` needs from the device, float64 in one dimension.

    The blocks have the same settings, and `is_within_reach` holds for all.
    """
    lengths = [len(question.block) for question in questions]
    log_odds = [question.log_odds for question in questions]
    decided, instead = _decide(_rows(questions), questions[0].draw, lengths, log_odds)
    return torch.cat([decided.flatten(), instead.flatten()])


def judge_together(
    questions: Sequence[ToJudge], decided: Float64Array
) -> list[Callable[[], Judgement]]:
    """Return calls that judge each block by what `decide_together` returned, on the host."""
    lengths = [len(question.block) for question in questions]
    drafted = decided[: 5 * sum(lengths)].reshape(5, -1).T
    instead = decided[5 * sum(lengths) :].reshape(5, -1).T
    parts = np.split(drafted, np.cumsum(lengths)[:-1])
    return [
        partial(_judgement, question, _outcomes(rows, correction, question.draw))
        for question, rows, correction in zip(questions, parts, instead, strict=True)
    ]


def _judgement(question: ToJudge, outcomes: Iterable[contenders.Outcome]) -> Judgement:
    """Commit outcomes up to a rejection; from one that is not sure on, ask the specification."""
    token_ids: list[int] = []
    num_accepted, log_odds = 0, question.log_odds
    for outcome in outcomes:
        if not outcome.is_sure:
            break
        token_ids.append(outcome.token)
        if question.draw.speculation.is_witnessed:
            log_odds = update_log_odds(log_odds, outcome.target_prob, outcome.told_prob)
        num_accepted += outcome.is_accepted
        is_finished = outcome.token in question.eos_ids
        if not outcome.is_accepted or is_finished or len(token_ids) == len(question.logits):
            return Judgement(tuple(token_ids), num_accepted, is_finished, log_odds=log_odds)
    return _continue(question, token_ids, num_accepted, log_odds)


def _continue(
    question: ToJudge, token_ids: list[int], num_accepted: int, log_odds: float
) -> Judgement:
    """Return the judgement that begins with some tokens; the specification gives the rest."""
    rest = question.by_specification(len(token_ids), log_odds)
    return replace(
        rest,
        token_ids=(*token_ids, *rest.token_ids),
        num_accepted=num_accepted + rest.num_accepted,
    )


def _outcomes(
    rows: Float64Array, correction: Float64Array, draw: Draw
) -> Iterator[contenders.Outcome]:
    """Yield the outcomes of a block's rows [k, 5], with the correction [5] for a rejected one."""
    for row in rows:
        is_accepted = bool(row[1])
        values = row if is_accepted or not (row[2] and _has_residual(draw)) else correction
        yield contenders.Outcome(
            int(values[0]), is_accepted, bool(values[2]), float(values[3]), float(values[4])
        )


def _rows(questions: Sequence[ToJudge]) -> BlockRows:
    """Return the rows of some blocks, on the device of their logits."""
    blocks, draw = [question.block for question in questions], questions[0].draw
    logits = _stack([question.logits[: len(question.block)] for question in questions])
    device, shape = logits.device, (len(logits), max(map(_width, blocks)))
    ids, probs = np.full(shape, -1, dtype=np.int64), np.zeros(shape)
    ends = np.cumsum([len(block) for block in blocks])
    for block, end in zip(blocks, ends, strict=True):
        place = slice(end - len(block), end), slice(_width(block))
        ids[place], probs[place] = block.candidate_ids, block.candidate_probs
    draws = [
        question.draw.after(row) for question in questions for row in range(len(question.block))
    ]
    numbers = np.zeros((len(draws), 1))
    if _has_residual(draw):
        numbers = uniforms_at(keys_of(draws, Purpose.ACCEPT), numbers)
    drawn_for = Purpose.RESIDUAL if _has_residual(draw) else Purpose.RESULT
    candidate_ids = torch.as_tensor(ids, device=device)
    draft = torch.as_tensor(probs, device=device)
    draft /= draft.sum(dim=-1, keepdim=True)
    is_real = candidate_ids >= 0
    witnesses = [
        question.witness[: len(question.block)]
        for question in questions
        if question.witness is not None and draw.speculation.is_witnessed
    ]
    return BlockRows(
        logits,
        torch.where(is_real, candidate_ids, candidate_ids[:, :1]),
        torch.where(is_real, draft, draft[:, :1]),
        is_real,
        torch.as_tensor(
            np.concatenate([block.token_ids for block in blocks]), device=device
        ).long(),
        torch.as_tensor(numbers[:, 0], device=device),
        torch.as_tensor(keys_of(draws, drawn_for), device=device),
        _stack(witnesses) if witnesses else None,
    )


def _width(block: DraftBlock) -> int:
    return int(block.candidate_ids.shape[1])


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _decide(
    rows: BlockRows, draw: Draw, lengths: Sequence[int], log_odds: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide all positions of some blocks, each as if the drafts before it were accepted.

    Return token, whether it was accepted, whether that is sure, p and q of the token [5, rows]; and
    likewise the token in place of the first rejected one of each block [5, blocks], without meaning
    where nothing is drawn from a residual.
    """
    is_witnessed = draw.speculation.is_witnessed
    probs = rows.draft.new_zeros((2, len(rows.drafted)))
    none = rows.draft.new_zeros((5, len(lengths)))
    if draw.is_greedy and draw.speculation.eta == 0:
        tokens, sure = fast.best_logit(rows.logits, draw.temperature)
        return _table(tokens, tokens == rows.drafted, sure, probs), none
    readings = fast.read(rows, draw)
    weights = None
    if is_witnessed:
        probs = readings.of(rows, rows.drafted)
        weights = weights_if_accepted(log_odds, lengths, probs)
    fused = fast.fuse_weights(rows, readings, draw, weights)
    if draw.is_greedy:  # filters keep the best token
        tokens, sure = fast.best_of(fused)
        probs = readings.of(rows, tokens) if is_witnessed else probs
        return _table(tokens, tokens == rows.drafted, sure, probs), none
    fused, are_kept = fast.filter_weights(fused, rows.logits, draw.sampling)
    if not _has_residual(draw):
        tokens, sure = fast.race_rows(fused, rows.keys)
        probs = readings.of(rows, tokens) if is_witnessed else probs
        return _table(tokens, tokens == rows.drafted, sure & are_kept, probs), none
    accepted, sure = fast.accept_rows(rows, fused)
    decided = _table(rows.drafted, accepted, sure & are_kept, probs)
    first = _first_rejected(accepted, lengths)
    rows, readings = rows.at(first), readings.at(first)
    fused, are_kept = fused.at(first), are_kept[first]
    tokens, sure = fast.correct_rows(rows, fused)
    probs = readings.of(rows, tokens) if is_witnessed else rows.draft.new_zeros((2, len(lengths)))
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


def _table(
    tokens: torch.Tensor, accepted: torch.Tensor, sure: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    return torch.cat([torch.stack([tokens, accepted, sure]).double(), probs])
