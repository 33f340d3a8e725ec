"""The retrieval query: the question in the last user message."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TokenOffsets = Callable[[str], Sequence[tuple[int, int]]]

_MAX_QUESTION_TOKENS = 512
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")


@dataclass(frozen=True, slots=True)
class Query:
    """A last message in two parts: ``context + question`` is the message.

    Attributes:
        text: Text to search for.
        question: End of the message, which the drafter reads verbatim.
        context: Text before the question that is too long to be read verbatim and is searched as a
            document; often empty.
    """

    text: str
    question: str
    context: str


def choose_query(
    message: str,
    token_offsets: TokenOffsets,
    *,
    budget_tokens: int,
    query: str | None = None,
) -> Query:
    """Find the question in the last user message.

    A message within the budget is the question. In a longer one the question is the last paragraphs
    of at most 512 tokens together (or the budget, if that is less); a last paragraph longer than
    this is cut at a token.

    Args:
        message: The last message of the user.
        token_offsets: Function that returns the character offsets of the target's tokens.
        budget_tokens: Budget of the retrieved context, in tokens.
        query: Text to search for instead of the question; it does not change how the message is
            split.
    """
    starts = [start for start, _ in token_offsets(message)]
    cut = 0
    if len(starts) > budget_tokens:
        earliest = starts[-min(_MAX_QUESTION_TOKENS, budget_tokens)]
        paragraphs = (match.end() for match in _PARAGRAPH.finditer(message, earliest))
        cut = next((p for p in paragraphs if p < len(message)), earliest)
    question = message[cut:]
    return Query(text=query or question.strip(), question=question, context=message[:cut])
