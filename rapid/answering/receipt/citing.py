"""The citations of complete answers, made while the leases are still held.

What a statement that is not copied owes to a passage is measured by taking it out of the drafter's
view (`LeaseRequest.masks`): the idea of ContextCite (arXiv 2409.00729) with kept keys and values.
It takes one more lease beside the drafter's, which shares the prompt's pages.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rapid.answering.leases.session import Holding
from rapid.answering.leases.sources import PoolSource
from rapid.answering.prompt.excerpts.query import choose_query
from rapid.answering.run import Run
from rapid.chat_messages import Document
from rapid.citing.copies import CitingRule, Claim, find_claims, find_copies, find_near, find_overlap
from rapid.errors import DrafterUnavailable, RapidError
from rapid.ports import EnginePool, Passage
from rapid.receipt import Citations

RULE = CitingRule()
_QUESTION_TOKENS = 512  # at the end of the last message: as many as the drafter reads verbatim
_ROOM_S = 1.0  # that an answer waits for a second lease on a drafter that is full


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """An answer that grows no more: its tokens, where the text of each ends, and its claims."""

    token_ids: list[int]
    ends: list[int]
    claims: list[Claim]

    def tokens_of(self, claim: Claim) -> slice:
        """Return the tokens that have a part of a claim."""
        return slice(bisect_right(self.ends, claim.start), 1 + bisect_left(self.ends, claim.stop))


async def cite(run: Run, verifier: Holding) -> Citations:
    """Return the citations of a run's answers, whose leases are held."""
    answers, texts = await run.services.prompts.read(run.request, _read_answers, run)
    claims = [claim for answer in answers for claim in answer.claims]
    needed = "not measured: no drafter has read passages"
    if run.chunks and run.plan.role == "drafter":
        needed = await _measure(run, answers, run.services.pools.alone, verifier)
    elif run.chunks and isinstance(run.source, PoolSource) and run.source.held is not None:
        needed = await _measure(run, answers, run.source.pool, run.source.held)
    for claim in claims:
        if not claim.citations and (best := find_overlap(claim, run.chunks, RULE)) is not None:
            claim.add("present", best)
        for each in claim.citations.copy():  # what does not stand in its document is no evidence
            whole = texts.get(each.document)
            if whole is not None and whole[each.document_start : each.document_end] != each.quote:
                claim.citations.remove(each)
    return Citations(
        tuple(citation for claim in claims for citation in claim.citations),
        tuple((each.choice, each.start, each.stop) for each in claims if not each.citations),
        needed,
    )


def _read_answers(
    documents: Sequence[Document], run: Run
) -> tuple[list[CompleteAnswer], dict[str, str]]:
    """Return the answers with their claims and what of these is copied, and texts by name."""
    text, request = run.services.prompts.target, run.request
    asked, answers = find_question(run), []
    for answer in run.answers:
        token_ids, growing = answer.statistics.token_ids, answer.decode_by(text.stream())
        ends = [*accumulate(len(growing.push([token_id])) for token_id in token_ids)]
        stops, includes_stop = request.stop_token_ids, request.include_stop_str_in_output
        shown = answer.decode_by(text.stream(request.stop, stops, includes_stop=includes_stop))
        # Calls state nothing.
        told = "" if answer.has_calls else shown.push(token_ids) + shown.finish()
        answers.append(CompleteAnswer(token_ids, ends, find_claims(answer.choice, told, asked)))
    find_copies([c for each in answers for c in each.claims], documents, run.chunks, RULE)
    return answers, {document.name: document.text for document in documents}


def find_question(run: Run) -> str:
    """Return the question at the end of what was last said; none where a prompt is no chat."""
    told = (each.text for each in reversed(run.request.messages) if each.role == "user")
    offsets = run.services.prompts.target.token_offsets
    return choose_query(next(told, ""), offsets, budget_tokens=_QUESTION_TOKENS).question


async def _measure(
    run: Run, answers: Sequence[CompleteAnswer], pool: EnginePool, held: Holding
) -> str:
    """Cite the passages that claims without a copy needed; return whether it was measured."""
    outcome = "not measured: statements are copied, or of other words than the passages"
    limit_s = run.services.patience.limit_s
    try:
        async with asyncio.timeout(limit_s):
            for answer in answers:
                claims = [claim for claim in answer.claims if not claim.citations]
                if not (near := find_near(claims, run.chunks)):
                    continue
                token_ids = answer.token_ids[: answer.tokens_of(claims[-1]).stop]
                scores, outcome = await _score(run, pool, held, token_ids, near), "measured"
                for claim in claims:
                    whole, *parts = (sum(each[answer.tokens_of(claim)]) for each in scores)
                    for passage, part in zip(near, parts, strict=True):
                        if RULE.is_needed(whole, part):
                            claim.add("needed", passage, round(whole - part, 3))
    except TimeoutError:
        return f"not measured: it was not done within {limit_s:g} s"
    except RapidError as error:
        return f"not measured: {error}"
    return outcome


async def _score(
    run: Run, pool: EnginePool, held: Holding, token_ids: list[int], passages: Sequence[Passage]
) -> Sequence[Sequence[float]]:
    """Return the log-probability of each token, with all and without each passage, or raise."""
    texts = [passage.text.strip() for passage in passages]
    spans = run.services.prompts.drafter.find_tokens(held.prompt_ids.tolist(), texts)
    masks = [(0, 0), *spans]
    beside = await run.session.take(
        pool,
        held.role,
        held.prompt_ids,
        timeout_s=_ROOM_S,
        committed=[token_ids] * len(masks),
        beside=held,
        terms=replace(run.session.terms, max_tokens=len(token_ids), num_choices=len(masks)),
        masks=masks,
    )
    try:
        scores = (await beside.prefill).scores
    finally:
        await beside.release()
    if not scores:
        raise DrafterUnavailable("the drafter's engine leaves out no part of a prompt")
    return scores
