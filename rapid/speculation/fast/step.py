"""All tokens of one step of an engine: proposals, blocks and plain tokens of several answers.

They are those of `rapid.speculation.acceptance` and `rapid.speculation.sampling`, in less time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TypeAlias, cast

import numpy as np
import torch

from rapid.messages import Float32Array, Int32Array
from rapid.speculation.acceptance import Judgement, decode_token, draft_purpose, propose
from rapid.speculation.draw import Draw
from rapid.speculation.fast import weights as fast
from rapid.speculation.fast.contenders import draw_token
from rapid.speculation.fast.judging import (
    decide_together,
    is_within_reach,
    judge_by_rows,
    judge_together,
)
from rapid.speculation.fast.philox import keys_of, uniforms_at
from rapid.speculation.noise import Float64Array, Purpose, race
from rapid.speculation.questions import (
    Answer,
    Decoded,
    Proposed,
    Question,
    ToDecode,
    ToJudge,
    ToPropose,
)
from rapid.speculation.sampling import as_sent, candidates, proposal

_LONG = 30_000  # tokens of a vocabulary from which a CPU gains; shorter ones are all overhead
_SPARSE = 50_000  # the same for the numbers of a proposal's candidates alone
_MOST_ROWS = 64  # of a batch, in which each takes 48 bytes a token of the vocabulary
_MOST_DRAWN = 1024  # candidates whose numbers alone are drawn

_Answers: TypeAlias = Sequence[Answer | Exception]
_Answering: TypeAlias = Generator[torch.Tensor, Float64Array, _Answers]


@torch.inference_mode()
def answer_questions(questions: Sequence[Question]) -> _Answers:
    """Return the drafted tokens with their proposals, the judgements and the plain tokens.

    An answer that cannot be given, as when logits are not numbers, is the exception, so that it
    ends its own request only. All logits are on one device.
    """
    if questions and questions[0].logits.device.type == "cuda":
        return answer_together(questions)
    # One by one, up to a rejection: a row's numbers stay in the cache.
    return [_try(partial(_alone, question)) for question in questions]


@torch.inference_mode()
def answer_together(questions: Sequence[Question]) -> _Answers:
    """Return what `answer_questions` returns, by batched operations and one transfer."""
    answers: dict[int, Answer | Exception] = {}
    batches = _batches(questions)
    answerings = [_begin([questions[index] for index in indices]) for indices in batches]
    asked = [next(answering) for answering in answerings]  # all is launched before any is read
    told = torch.cat(asked).cpu().numpy()
    for indices, answering, part in zip(batches, answerings, asked, strict=True):
        try:
            answering.send(told[: len(part)])
        except StopIteration as end:
            answers.update(zip(indices, end.value, strict=True))
        told = told[len(part) :]
    return [answers[index] for index in range(len(questions))]


def _batches(questions: Sequence[Question]) -> list[list[int]]:
    """Return the questions that are answered in one batch each: same settings, not many rows."""
    # Batches are computed one after the other, so the longest one decides on the memory.
    batches: list[list[int]] = []
    rooms: dict[object, int] = {}  # rows that the latest batch of some settings has room for
    latest: dict[object, list[int]] = {}
    for index, question in enumerate(questions):
        settings = _settings(question) or index
        num_rows = max(len(question.block), 1) if isinstance(question, ToJudge) else 1
        if rooms.get(settings, 0) < num_rows:
            latest[settings], rooms[settings] = [], _MOST_ROWS
            batches.append(latest[settings])
        latest[settings].append(index)
        rooms[settings] -= num_rows
    return batches


def judge_block(question: ToJudge) -> Judgement:
    """Return the judgement of one block, or raise EngineFailed if it contains NaN or +inf."""
    (answer,) = answer_questions([question])
    if isinstance(answer, Exception):
        raise answer
    return cast(Judgement, answer)


def _settings(question: Question) -> object:
    """Return what the questions of one batch have in common; None for one that joins no batch."""
    if isinstance(question, ToJudge):
        if not is_within_reach(question):
            return None
    elif isinstance(question, ToDecode) and question.num_logprobs is not None:
        return None
    # What joins no batch is too rare: log-probabilities, the rule `paper`, uncut proposals.
    sampling, speculation = question.draw.sampling, question.draw.speculation
    return (
        type(question),
        (sampling.temperature, sampling.top_k, sampling.top_p),
        (speculation.transfer, speculation.eta, speculation.plausibility, speculation.coupling),
        (speculation.draft_top_k, speculation.transfer_temperature),
        isinstance(question, ToJudge) and question.witness is None,
    )


def _begin(questions: Sequence[Question]) -> _Answering:
    """Answer a group of questions: yield the values to bring to the host, and take them there."""
    first = questions[0]
    if _settings(first) is None:
        yield first.logits.new_empty(0, dtype=torch.float64)
        return [_try(partial(_alone, first))]
    judging = [question for question in questions if isinstance(question, ToJudge)]
    if judging:
        decided = yield decide_together(judging)
        return [_try(judge) for judge in judge_together(judging, decided)]
    proposing = [question for question in questions if isinstance(question, ToPropose)]
    if proposing:
        logits = torch.stack([question.logits for question in proposing])
        ids, best = candidates(logits, first.draw)
        sent = yield torch.stack([ids.double(), best]).flatten()
        sent_ids, sent_probs = sent.reshape(2, len(proposing), -1)
        return [
            _try(partial(_receive, row_ids, row_probs, question.draw))
            for row_ids, row_probs, question in zip(
                sent_ids.astype(np.int32), sent_probs.astype(np.float32), proposing, strict=True
            )
        ]
    decoding = [question for question in questions if isinstance(question, ToDecode)]
    decoded = yield torch.stack(_draw(decoding)).double().flatten()
    return [
        Decoded(int(token)) if is_sure else _try(partial(_decode_by_rule, question))
        for token, is_sure, question in zip(*decoded.reshape(2, -1), decoding, strict=True)
    ]


def _alone(question: Question) -> Answer:
    """Answer one question row by row: on a CPU, or where it joins no batch."""
    logits = question.logits
    is_long = logits.shape[-1] >= _LONG and logits.dtype == torch.float32
    if isinstance(question, ToPropose):
        return _propose(*proposal(question.logits, question.draw), question.draw)
    if isinstance(question, ToDecode):
        if question.num_logprobs is None and is_long:
            token, is_sure = draw_token(question.logits, question.draw)
            if is_sure:
                return Decoded(token)
        return _decode_by_rule(question)
    if is_long and is_within_reach(question):
        return judge_by_rows(question)
    return question.by_specification()


def _try(answer: Callable[[], Answer]) -> Answer | Exception:
    try:
        return answer()
    except Exception as error:
        return error


def _receive(ids: Int32Array, probs: Float32Array, draw: Draw) -> Proposed:
    return _propose(*as_sent(ids, probs), draw)


def _propose(ids: Int32Array, probs: Float32Array, draw: Draw) -> Proposed:
    """Draw a token as `propose` does; from a long vocabulary with the candidates' numbers alone."""
    if draw.is_greedy or ids.max() < _SPARSE or len(ids) > _MOST_DRAWN:
        return Proposed(propose(ids, probs, draw), ids, probs)
    noise = uniforms_at(keys_of([draw], draft_purpose(draw)), ids[None])[0]
    return Proposed(int(ids[race(probs.astype(np.float64), noise)]), ids, probs)


def _decode_by_rule(question: ToDecode) -> Decoded:
    return Decoded(*decode_token(question.logits, question.draw, question.num_logprobs))


def _draw(questions: Sequence[ToDecode]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of the model's own distribution, and whether they are sure [questions]."""
    logits = torch.stack([question.logits for question in questions])
    draw = questions[0].draw
    if draw.is_greedy:
        return fast.best_logit(logits, draw.temperature)
    probs = fast.softmax(logits, draw)
    own = fast.Weights.of_probabilities(probs, logits, draw.temperature)
    kept, are_kept = fast.filter_weights(own, logits, draw.sampling)
    keys = keys_of([question.draw for question in questions], Purpose.RESULT)
    tokens, sure = fast.race_rows(kept, torch.as_tensor(keys, device=logits.device))
    return tokens, sure & are_kept
