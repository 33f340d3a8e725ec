"""The citations of complete answers, made while the leases are still held.

The drafter has read a few passages only, so what a statement owes to one of them is measured by
taking that passage out of its view (`EngineLease.score_masked`): the idea of ContextCite (arXiv
2409.00729) with kept keys and values. It is measured where words alone do not say where a statement
is from, in one more lease beside the drafter's, which shares the prompt's pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from rapid.answering.query import choose_query
from rapid.answering.run import Run
from rapid.answering.session import Holding, Session
from rapid.answering.sources import PoolSource
from rapid.citing.copies import (
    CitingRule,
    Claim,
    Place,
    find_claims,
    find_copies,
    find_overlap,
    place_of,
)
from rapid.citing.words import Span
from rapid.errors import RapidError, UnknownDocument
from rapid.messages import Document, Float32Array
from rapid.ports import EnginePool
from rapid.receipt import Citation, Citations, EvidenceKind

RULE = CitingRule()
_QUESTION_TOKENS = 512  # at the end of the last message: as many as the drafter reads verbatim

_ROOM_S = 1.0  # that an answer waits for a second lease on a drafter that is full


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """An answer that grows no more.

    Attributes:
        token_ids: Its tokens as far as they have text.
        ends: The characters of the text up to the end of each token.
    """

    choice: int
    token_ids: tuple[int, ...]
    ends: tuple[int, ...]
    claims: list[Claim]

    def tokens_of(self, span: Span) -> slice:
        """Return the tokens that have a part of some characters."""
        first = next(i for i, end in enumerate(self.ends) if end > span[0])
        return slice(first, 1 + next(i for i, end in enumerate(self.ends) if end >= span[1]))


async def cite(run: Run, verifier: Holding) -> Citations:
    """Return the citations of a run's answers, whose leases are held."""
    prompts = run.services.prompts
    try:
        documents = await prompts.resolve(run.request)
    except UnknownDocument:  # deleted while it was read: what was retrieved of it is known
        documents = ()
    answers = await prompts.work(run.request, _read_answers, run, documents)
    falls, needed = await _measure(run, verifier, answers)
    texts = {document.name: document.text for document in documents}
    found: list[Citation] = []
    unsupported: list[tuple[int, int, int]] = []
    for answer in answers:
        for claim in answer.claims:
            cited = [
                Citation(
                    answer.choice,
                    *span,
                    evidence,
                    place.document,
                    place.passage_id,
                    place.start,
                    place.stop,
                    place.quote,
                    fall,
                )
                for span, evidence, place, fall in _support(run, answer, claim, falls)
                if texts.get(place.document, "")[place.start : place.stop] in ("", place.quote)
            ]
            found.extend(cited)
            if not cited:
                unsupported.append((answer.choice, *claim.span))
    return Citations(tuple(found), tuple(unsupported), needed)


def _support(
    run: Run, answer: CompleteAnswer, claim: Claim, falls: dict[int, Float32Array]
) -> Iterator[tuple[Span, EvidenceKind, Place, float | None]]:
    """Yield what supports a claim: copies, else the passages that it needed, else their words."""
    copied = sorted(claim.copies)
    for span, place in copied:
        yield span, "copied", place, None
    needed: dict[int, float] = {}
    if answer.choice in falls and not claim.is_copied:
        own = falls[answer.choice][:, answer.tokens_of(claim.span)].sum(axis=1)
        needed = {i: float(fall) for i, fall in enumerate(own) if fall >= RULE.least_fall}
    for index, fall in needed.items():
        yield claim.span, "needed", place_of(run.chunks[index]), round(fall, 3)
    if not (copied or needed) and (best := find_overlap(claim, run.chunks, RULE)) is not None:
        yield claim.span, "present", place_of(best), None


def _read_answers(run: Run, documents: Sequence[Document]) -> list[CompleteAnswer]:
    """Return the answers with their claims and what of these is copied."""
    text, request = run.services.prompts.target, run.request
    last = next(each.text for each in reversed(request.messages) if each.role == "user")
    asked = choose_query(last, text.token_offsets, budget_tokens=_QUESTION_TOKENS).question
    answers = []
    for answer in run.answers:
        token_ids = answer.statistics.token_ids
        growing, shown = text.stream(), text.stream(request.stop)
        ends = accumulate(len(growing.push([token_id])) for token_id in token_ids)
        told = shown.push(token_ids) + shown.finish()
        claims = find_claims(told, asked)
        answers.append(CompleteAnswer(answer.choice, tuple(token_ids), tuple(ends), claims))
    find_copies([c for each in answers for c in each.claims], documents, run.chunks, RULE)
    return answers


async def _measure(
    run: Run, verifier: Holding, answers: Sequence[CompleteAnswer]
) -> tuple[dict[int, Float32Array], str]:
    """Return for each choice the nats that each token loses without each passage.

    They are [passages, tokens]. Choices whose statements are all copied are left out. The second
    result says whether it was measured, or why not.
    """
    passages, prompts = run.chunks, run.services.prompts
    waiting = [each for each in answers if not all(claim.is_copied for claim in each.claims)]
    if not passages:
        return {}, "not measured: no drafter has read passages"
    if run.plan.role == "drafter":
        pool, held = run.services.pools.alone, verifier
    elif isinstance(run.source, PoolSource) and run.source.held is not None:
        pool, held = run.source.pool, run.source.held
    else:
        return {}, "not measured: the drafter was lost"
    texts = [passage.text.strip() for passage in passages]
    spans = prompts.drafter.find_tokens(run.prompts["drafter"].tolist(), texts)
    falls: dict[int, Float32Array] = {}
    limit_s = run.services.patience.limit_s
    try:
        async with asyncio.timeout(limit_s):
            for answer in waiting:
                falls[answer.choice] = await _fall(run.session, pool, held, answer, spans)
    except TimeoutError:
        return falls, f"not measured: it was not done within {limit_s:g} s"
    except RapidError as error:
        return falls, f"not measured: {error}"
    return falls, "measured" if waiting else "not measured: all statements are copied"


async def _fall(
    session: Session,
    pool: EnginePool,
    held: Holding,
    answer: CompleteAnswer,
    spans: Sequence[Span | None],
) -> Float32Array:
    """Return the nats that each token of an answer loses without each span [spans, tokens]."""
    last = max(claim.span[1] for claim in answer.claims if not claim.is_copied)
    token_ids = answer.token_ids[: answer.tokens_of((0, last)).stop]
    terms = replace(
        session.terms,
        max_tokens=len(token_ids),
        num_choices=1 + len(spans),
        num_logprobs=None,
    )
    beside = await session.take(
        pool, held.role, held.prompt_ids, timeout_s=_ROOM_S, beside=held, terms=terms
    )
    try:
        await beside.prefill
        masks = [(0, 0), *((0, 0) if span is None else span for span in spans)]
        whole, *parts = await beside.lease.score_masked(token_ids, masks)
    finally:
        await beside.release()
    falls: Float32Array = whole - np.array(parts)
    return falls
