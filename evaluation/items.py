"""One question of any benchmark, before any prompt is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rapid.messages import Document, Message


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its right answers.

    Attributes:
        id: unique within the task and stable: runs resume by it.
        messages: the chat, its last message the question as a person would ask it; earlier ones are
            the history of a dialogue.
        document: the long text to be read; None when the history is the long text.
        answers: right answers; any of them counts.
        query: what retrieval searches with; None takes the question. (The paper leaves multiple
            choices out of it.)
        fields: what the task's templates name besides the context: question, choice_A, ...
        groups: what reports split by: difficulty, length, domain, kind, ...
        evidence: character spans of `document` that the answer is made of, where they are known.
    """

    id: str
    messages: tuple[Message, ...]
    document: Document | None
    answers: tuple[str, ...]
    query: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    evidence: tuple[tuple[int, int], ...] = ()
