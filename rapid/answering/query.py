"""What to search for: the question in a person's last message."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TokenOffsets = Callable[[str], Sequence[tuple[int, int]]]

_MAX_QUESTION_TOKENS = 512
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")


@dataclass(frozen=True, slots=True)
class Query:
    """A last message taken apart: ``context + question`` is the message."""

    text: str
    """What to search for."""
    question: str
    """The end of the message, to be shown word for word."""
    context: str
    """What stood before it and is too long to show: a document to be searched. Often empty."""


def choose_query(
    message: str,
    token_offsets: TokenOffsets,
    *,
    budget_tokens: int,
    query: str | None = None,
) -> Query:
    """Find the question.

    A message within the budget is the question. Of a longer one it is the last paragraphs that make
    at most 512 tokens (or the budget, if that is less); a last paragraph longer than this is cut at
    a token.

    Args:
        message: The last message of the user.
        token_offsets: Tokens of the target's tokenizer.
        budget_tokens: The budget of the retrieved context.
        query: Overrides what is searched for, not how the message is taken apart.
    """
    starts = [start for start, _ in token_offsets(message)]
    cut = 0
    if len(starts) > budget_tokens:
        earliest = starts[-min(_MAX_QUESTION_TOKENS, budget_tokens)]
        paragraphs = (match.end() for match in _PARAGRAPH.finditer(message, earliest))
        cut = next((p for p in paragraphs if p < len(message)), earliest)
    question = message[cut:]
    return Query(text=query or question.strip(), question=question, context=message[:cut])
