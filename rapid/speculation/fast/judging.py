"""Judging of blocks by weights: what `rapid.speculation.acceptance.judge` says, in less time.

From the first decision that is not sure on, the specification judges the rest of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from rapid.receipt import TokenProbs
from rapid.speculation.acceptance import Judgement
from rapid.speculation.fast import contenders
from rapid.speculation.fusion import update_log_odds
from rapid.speculation.questions import ToJudge

_MOST_CANDIDATES = 1024  # of a proposal; with more there is little of a row to leave out
_MOST_ETA = 300.0  # exp(2 * eta) must be a number in float64
_TRANSFERS = ("adaptive", "boost", "distill", "mixture")  # others the specification judges


def is_within_reach(question: ToJudge) -> bool:
    """Return whether a block can be judged by weights."""
    block, speculation = question.block, question.draw.speculation
    if question.num_logprobs is not None or speculation.rule != "exact":
        return False
    if not len(block):
        return True
    ids = np.sort(block.candidate_ids, axis=-1)
    is_twice = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    return (
        ids.shape[1] <= _MOST_CANDIDATES
        and bool((block.candidate_ids[:, 0] >= 0).all() and not is_twice.any())
        and speculation.eta <= _MOST_ETA
        and speculation.transfer in _TRANSFERS
    )


def has_contenders(question: ToJudge) -> bool:
    """Return whether few tokens of each row can be chosen: not where a proposal moves all."""
    speculation = question.draw.speculation
    moves_all = speculation.transfer == "distill" and speculation.plausibility == 0
    is_bounded = not (moves_all and speculation.eta > 0)
    return len(question.block) > 0 and is_bounded and is_within_reach(question)


def judge_by_rows(question: ToJudge) -> Judgement:
    """Judge a block on a CPU up to the first rejection; `has_contenders` must hold."""
    block, draw, log_odds = question.block, question.draw, question.log_odds
    all_ids = block.candidate_ids.astype(np.int64)
    probs = block.candidate_probs.astype(np.float64)
    token_ids: list[int] = []
    of_tokens: list[TokenProbs] = []
    num_specified = 0
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
            explains=question.explains,
        )
        token, is_accepted, of_token = outcome.token, outcome.is_accepted, outcome.probs
        if not outcome.is_sure:
            alone = question.by_specification(row, log_odds, num_rows=1)
            token, is_accepted = alone.token_ids[0], alone.num_accepted == 1
            log_odds, of_token = alone.log_odds, alone.probs
            num_specified += 1
        elif draw.speculation.is_witnessed:
            log_odds = update_log_odds(log_odds, outcome.target_prob, outcome.told_prob)
        token_ids.append(token)
        of_tokens += of_token
        is_finished = token in question.eos_ids
        if not is_accepted or is_finished or len(token_ids) == len(question.logits):
            return Judgement(
                tuple(token_ids), row + is_accepted, is_finished, (), log_odds, num_specified,
                tuple(of_tokens),
            )  # fmt: skip
    rest = _continue(question, token_ids, of_tokens, len(block), log_odds)
    return replace(rest, num_specified=rest.num_specified + num_specified)


def commit_outcomes(question: ToJudge, outcomes: Iterable[contenders.Outcome]) -> Judgement:
    """Commit outcomes up to a rejection; from one that is not sure on, ask the specification."""
    token_ids: list[int] = []
    probs: list[TokenProbs] = []
    num_accepted, log_odds = 0, question.log_odds
    for outcome in outcomes:
        if not outcome.is_sure:
            break
        token_ids.append(outcome.token)
        probs += outcome.probs
        if question.draw.speculation.is_witnessed:
            log_odds = update_log_odds(log_odds, outcome.target_prob, outcome.told_prob)
        num_accepted += outcome.is_accepted
        is_finished = outcome.token in question.eos_ids
        if not outcome.is_accepted or is_finished or len(token_ids) == len(question.logits):
            return Judgement(
                tuple(token_ids), num_accepted, is_finished, (), log_odds, probs=tuple(probs)
            )
    return _continue(question, token_ids, probs, num_accepted, log_odds)


def _continue(
    question: ToJudge,
    token_ids: list[int],
    probs: list[TokenProbs],
    num_accepted: int,
    log_odds: float,
) -> Judgement:
    """Return the judgement that begins with some tokens; the specification gives the rest."""
    rest = question.by_specification(len(token_ids), log_odds)
    return replace(
        rest,
        token_ids=(*token_ids, *rest.token_ids),
        probs=(*probs, *rest.probs),
        num_accepted=num_accepted + rest.num_accepted,
    )
