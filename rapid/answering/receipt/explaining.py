"""Explained answers: for each token who wrote it, how likely it was, and where its words stand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from rapid.answering.answers import GrowingAnswer
from rapid.answering.leases.session import Role
from rapid.answering.receipt.citing import RULE, find_question
from rapid.answering.run import Run
from rapid.citing.copies import find_claims, find_copies
from rapid.receipt import MOST_EXPLAINED, Citation, ExplainedToken, Explanation, TokenProbs

_NOTHING = TokenProbs()
_DIGITS = 6  # of a probability: as many as two engines of different kernels may agree on


async def explain(run: Run) -> Explanation:
    """Return the explanation of a run's complete answers."""
    # Looking for copied words takes milliseconds, in which other answers go on.
    tokens = await asyncio.to_thread(_explain_answers, run)
    counters = [answer.statistics for answer in run.answers]

    def prompt(role: Role) -> tuple[int, ...]:
        is_told = run.request.explains_prompts and role in run.prompts
        return tuple(run.prompts[role].tolist()) if is_told else ()

    return Explanation(
        target_prompt_ids=prompt("target"),
        drafter_prompt_ids=prompt("drafter"),
        witness_prompt_ids=prompt("witness"),
        token_ids=tuple(tuple(each.token_ids) for each in counters),
        origins=tuple(tuple(each.origins) for each in counters),
        tokens=tokens,
        truncated=any(len(each.token_ids) > MOST_EXPLAINED for each in counters),
    )


def _explain_answers(run: Run) -> tuple[tuple[ExplainedToken, ...], ...]:
    spelled = [[*answer.spell_tokens(MOST_EXPLAINED)] for answer in run.answers]
    cited = _find_copies(run, spelled)
    return tuple(
        tuple(_explain_tokens(run, answer, texts, found))
        for answer, texts, found in zip(run.answers, spelled, cited, strict=True)
    )


def _find_copies(run: Run, spelled: Sequence[list[tuple[str, bool]]]) -> list[list[Citation]]:
    """Return, for each answer, which of its words are copied from a passage that was retrieved."""
    if not run.chunks:
        return [[] for _ in spelled]
    question = find_question(run)
    all_claims = []
    for choice, texts in enumerate(spelled):
        told = "".join(text for text, is_thinking in texts if not is_thinking)
        has_calls = run.answers[choice].has_calls  # which state nothing
        all_claims.append([] if has_calls else find_claims(choice, told, question))
    find_copies([claim for claims in all_claims for claim in claims], (), run.chunks, RULE)
    return [[each for claim in claims for each in claim.citations] for claims in all_claims]


def _explain_tokens(
    run: Run, answer: GrowingAnswer, texts: list[tuple[str, bool]], copies: list[Citation]
) -> Iterator[ExplainedToken]:
    counters, is_rag, end = answer.statistics, run.outcome.mode == "rag", 0
    for position, (text, is_thinking) in enumerate(texts):
        probs = counters.probs.get(position, _NOTHING)
        target, drafter, sampled = map(_round, (probs.target, probs.drafter, probs.sampled))
        passage = None
        if not is_thinking and text:
            start, end = end, end + len(text)
            within = (each.passage_id for each in copies if each.start < end and start < each.end)
            passage = next(within, None)
        yield ExplainedToken(
            text=text,
            writer="drafter" if is_rag else counters.origins[position],
            target=None if is_rag else target,
            drafter=target if is_rag else drafter,  # which answers, with its own distribution
            sampled=sampled,
            passage=passage,
            is_thinking=is_thinking,
        )


def _round(prob: float | None) -> float | None:
    return None if prob is None else float(f"{prob:.{_DIGITS}g}")
