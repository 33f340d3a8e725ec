"""The common form of a benchmark's questions, from which prompts are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rapid.chat_messages import Document, Message


@dataclass(frozen=True, slots=True)
class Item:
    """A question with its right answers.

    Attributes:
        id: Identifier, unique within the task and stable, because runs resume by it.
        messages: The chat. Its last message is the question in plain words; earlier ones are the
            history of a dialogue.
        document: The long text to read, or None when the history is the long text.
        query: What retrieval searches with; None takes the question.
        fields: Values that the task's templates name besides the context: question, choice_A, ...
        groups: Properties that reports split by: difficulty, length, domain, kind, ...
        evidence: Character spans of `document` that the answer is made of, where they are known.
    """

    id: str
    messages: tuple[Message, ...]
    document: Document | None
    answers: tuple[str, ...]
    query: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    evidence: tuple[tuple[int, int], ...] = ()
