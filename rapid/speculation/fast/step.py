"""All tokens of one step of an engine: proposals, blocks and plain tokens of several answers.

They are those of `rapid.speculation.acceptance` and `rapid.speculation.sampling`, in less time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from rapid.messages import DraftBlock
from rapid.speculation.acceptance import Judgement
from rapid.speculation.draw import Draw
from rapid.speculation.fast.contenders import draw_token, own_prob, propose_sparsely
from rapid.speculation.fast.judging import has_contenders, judge_by_rows
from rapid.speculation.noise import Float64Array
from rapid.speculation.questions import (
    Answer,
    Decoded,
    Proposed,
    Question,
    ToDecode,
    ToJudge,
    ToPropose,
)
from rapid.speculation.sampling import proposal

# Settings of the method with which kernels are checked, as in `rapid.config.SpeculationConfig`.
_CHECKED = SimpleNamespace(
    rule="exact", transfer="adaptive", eta=10.0, is_witnessed=True, coupling="maximal",
    plausibility=0.1, draft_top_k=64, transfer_temperature=1.0,
)  # fmt: skip

logger = logging.getLogger(__name__)

MOST_DRAWN = 1024  # candidates of a proposal from which a kernel draws
_LONG = 30_000  # tokens of a vocabulary from which a CPU gains; shorter ones are all overhead

_Answers: TypeAlias = Sequence[Answer | Exception]


@torch.inference_mode()
def answer_questions(questions: Sequence[Question]) -> _Answers:
    """Return the drafted tokens with their proposals, the judgements and the plain tokens.

    An answer that cannot be given, as when logits are not numbers, is the exception, so that it
    ends its own request only. All logits are on one device.
    """
    if questions and (device := questions[0].logits.device).type == "cuda":
        if has_kernels(device):
            return answer_together(questions)
        return [_try(question.by_specification) for question in questions]
    # One by one, up to a rejection: a row's numbers stay in the cache.
    return [_try(partial(_alone, question)) for question in questions]


@torch.inference_mode()
def answer_together(questions: Sequence[Question]) -> _Answers:
    """Return what `answer_questions` returns, in batches of any settings and one transfer back."""
    from rapid.speculation.fast import together  # needs Triton, which there is beside CUDA

    batches = together.make_batches(questions)
    asked = [batch.ask() for batch in batches]  # all is launched before any is read
    answers: dict[int, Answer | Exception] = {}
    if asked:
        told = torch.cat([part.flatten() for part in asked]).cpu().numpy()
        sizes = [part.numel() for part in asked]
        for batch, values in zip(batches, np.split(told, np.cumsum(sizes)[:-1]), strict=True):
            answers.update(zip(batch.indices, map(_try, batch.receive(values)), strict=True))
    return [
        answers[index] if index in answers else _try(question.by_specification)
        for index, question in enumerate(questions)
    ]


@dataclass(frozen=True, slots=True)
class DrawnDrafts:
    """Drafted tokens that lie on the device of their logits, and what is to be read of them."""

    tokens: torch.Tensor  # one for each question, int64 [n]
    parts: list[torch.Tensor]  # float64, on the device; empty where all is known already
    receive: Callable[[list[Float64Array]], _Answers]  # returns the answers by the parts' values


@torch.inference_mode()
def draw_drafts(questions: Sequence[ToPropose]) -> DrawnDrafts:
    """Draw drafted tokens without reading them, so that the next forward can be fed with them.

    Only where kernels draw is nothing read: elsewhere it is done by `answer_questions`.
    """
    logits = questions[0].logits
    most = max(question.draw.speculation.draft_top_k or logits.shape[-1] for question in questions)
    if logits.is_cuda and has_kernels(logits.device) and most <= MOST_DRAWN:
        return draw_together(questions)
    answers = answer_questions(questions)
    tokens = [0 if isinstance(answer, Exception) else _token_of(answer) for answer in answers]
    return DrawnDrafts(torch.tensor(tokens, device=logits.device), [], lambda _: answers)


def draw_together(questions: Sequence[ToPropose]) -> DrawnDrafts:
    """Return what `draw_drafts` returns, in batches of any settings."""
    from rapid.speculation.fast import together  # needs Triton, which there is beside CUDA

    batches = together.make_batches(questions)
    drawn = [batch.draw() for batch in batches if isinstance(batch, together.Proposing)]
    order = [index for batch in batches for index in batch.indices]
    tokens = torch.cat([tokens for _, tokens in drawn])
    if len(batches) > 1:
        tokens = tokens[torch.tensor(order).argsort().to(tokens.device)]

    def receive(values: list[Float64Array]) -> _Answers:
        answers: dict[int, Answer | Exception] = {}
        for batch, of_batch in zip(batches, values, strict=True):
            answers.update(zip(batch.indices, map(_try, batch.receive(of_batch)), strict=True))
        return [answers[index] for index in range(len(questions))]

    return DrawnDrafts(tokens, [candidates for candidates, _ in drawn], receive)


def read_drafts(drawn: Sequence[DrawnDrafts]) -> list[list[tuple[int, Answer | Exception]]]:
    """Read drafted tokens at once; return each as it lies on the device, and its answer.

    The answer's token, which counts, may be another one where two races are closer than a rounding.
    """
    parts = [part.flatten() for each in drawn for part in (each.tokens.double(), *each.parts)]
    values = iter(np.split(torch.cat(parts).cpu().numpy(), np.cumsum([*map(len, parts)])[:-1]))
    return [
        list(
            zip(
                next(values).astype(int).tolist(),
                each.receive([next(values) for _ in each.parts]),
                strict=True,
            )
        )
        for each in drawn
    ]


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels answer as the specification does on a device; log it if not."""
    logits = torch.randn(3, 3_000, generator=torch.Generator().manual_seed(0)).mul(4).to(device)
    try:
        for top_p in (1.0, 0.9):  # which are compiled apart
            questions: list[Question] = []
            for temperature in (0.0, 0.7):
                # Stand-ins, as `rapid.config` needs pydantic, which the GPU benchmark does without.
                sampling = SimpleNamespace(
                    temperature=temperature, top_k=None, top_p=top_p, min_p=0.0, seed=0
                )
                draw = Draw(cast(Any, sampling), cast(Any, _CHECKED), 0, 0)
                ids, probs = proposal(logits[0], draw)
                block = DraftBlock("check", 0, 0, ids[:1], ids[None], probs[None])
                judging = ToJudge(block, logits[1:2], draw, frozenset(), witness=logits[2:])
                questions += [ToDecode(logits[0], draw), ToPropose(logits[0], draw), judging]
            expected = [_tokens_of(question.by_specification()) for question in questions]
            if [_tokens_of(answer) for answer in answer_together(questions)] != expected:
                logger.warning("kernels that draw tokens disagree with the specification: not used")
                return False
            read_drafts(
                [draw_together([each for each in questions if isinstance(each, ToPropose)])]
            )
    except Exception:
        logger.warning("kernels that draw tokens fail, and are not used", exc_info=True)
        return False
    return True


def _token_of(answer: Answer) -> int:
    return cast(Proposed, answer).token


def _tokens_of(answer: Answer | Exception) -> object:
    """Return the tokens of an answer, or raise what it is in place of one."""
    if isinstance(answer, Exception):
        raise answer
    return answer.token_ids if isinstance(answer, Judgement) else answer.token


def judge_block(question: ToJudge) -> Judgement:
    """Return the judgement of one block, or raise EngineFailed if it contains NaN or +inf."""
    (answer,) = answer_questions([question])
    if isinstance(answer, Exception):
        raise answer
    return cast(Judgement, answer)


def _alone(question: Question) -> Answer:
    """Answer one question row by row: on a CPU, or where it joins no batch."""
    logits = question.logits
    is_long = logits.shape[-1] >= _LONG and logits.dtype == torch.float32
    if isinstance(question, ToPropose):
        return propose_sparsely(*proposal(question.logits, question.draw), question.draw)
    if isinstance(question, ToDecode):
        if question.num_logprobs is None and is_long:
            token, is_sure = draw_token(question.logits, question.draw)
            if is_sure:
                is_told, told_of = question.explains, (question.logits, token, question.draw)
                return Decoded(token, probs=own_prob(*told_of) if is_told else None)
    elif is_long and has_contenders(question):
        return judge_by_rows(question)
    return question.by_specification()


def _try(answer: Callable[[], Answer]) -> Answer | Exception:
    try:
        return answer()
    except Exception as error:
        return error
