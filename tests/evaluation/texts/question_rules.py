"""The rules that every question on real text keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pydantic import ValidationError

from evaluation.texts.text_questions import (
    Kind,
    TextQuestion,
    document_text,
    holds,
    questions_of,
    span_of,
    words,
)

STEM = 5
"""Words that begin with the same letters, this many, count as one word."""
_NO_CONTENT = """
    a about after all also an and any are as at be been before but by can cannot could did do does
    each else for from get gets given gives had has have how i if in into is it its itself let may
    me might more most must my no not of off on one only or other our out over own same shall she
    should so some such than that the their them then there these they this those through to too two
    under until up upon us use used was way we were what when where whether which while who whom
    whose why will with within without would you your
"""
NO_CONTENT = frozenset(_NO_CONTENT.split())


def content_stems(text: str) -> set[str]:
    """Return the first letters of the words that carry meaning."""
    return {word[:STEM] for word in words(text) if len(word) > 2 and word not in NO_CONTENT}


def faults(question: TextQuestion) -> Iterator[str]:
    """Yield what is wrong with a question, a sentence each."""
    text = document_text(question.document)
    for passage in question.evidence:
        if span_of(passage, text) is None:
            yield f"the evidence is not in the document: {passage!r}"
    evidence = "\n".join(question.evidence)
    if question.kind == "unanswerable":
        if question.answer or question.evidence:
            yield "an unanswerable question has neither answer nor evidence"
        return
    if not question.answer or not question.evidence:
        yield "an answer and its evidence are missing"
    for part in question.answer:
        if not any(holds(evidence, spelling) for spelling in part):
            yield f"no spelling of {part} is in the evidence"
        if any(holds(question.question, spelling) for spelling in part):
            yield f"the question gives {part} away"
        if any(len(words(spelling)) > 8 for spelling in part):
            yield f"{part} is longer than eight words"
    if question.kind == "several places" and len(question.evidence) < 2:
        yield "several places are two passages or more"
    if question.kind == "one place" and not content_stems(question.question) & content_stems(
        evidence
    ):
        yield "no content word of the question is in the evidence: it is a paraphrase"
    shared = content_stems(question.question) & content_stems(evidence)
    if question.kind == "paraphrase" and shared:
        yield f"question and evidence share {', '.join(sorted(shared))}"


def faults_of(name: str) -> Iterator[str]:
    """Yield what is wrong with the questions of a document."""
    try:
        questions = questions_of(name)
    except (OSError, ValidationError) as error:
        yield f"{name}: {error}"
        return
    seen: set[str] = set()
    for question in questions:
        if question.document != name or question.id in seen:
            yield f"{question.id}: the id is used twice, or names another document"
            continue
        seen.add(question.id)
        yield from (f"{question.id}: {fault}" for fault in faults(question))
    for kind in get_args(Kind):
        if not any(question.kind == kind for question in questions):
            yield f"{name}: there is no question of the kind {kind}"
