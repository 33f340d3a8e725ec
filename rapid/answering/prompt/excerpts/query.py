"""The question in the last user message, and the text to search for, which is the question's end.

The drafter reads the question, so it may be long. Retrieval searches for the end of it alone: in a
message that is a document with a question after it, the words of the document would outnumber
those of the question, in the search as in the evidence that `auto` needs to fuse.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rapid.chat_messages import Message

TokenOffsets = Callable[[str], Sequence[tuple[int, int]]]

_MAX_QUESTION_TOKENS = 512
_MAX_SHORT_TOKENS = 128
_MAX_JOINED_TOKENS = 32
_MAX_FOLLOW_UP_TOKENS = 12
# What a question that leaves something out begins with or names, in English. Length alone says too
# little: in a chat about several documents whole questions find less behind others
# (benchmarks/results/follow_ups.md).
_FOLLOWS = re.compile(
    r"^\W*(and|but|or|also|what about|how about)\b"
    r"|\b(it|its|that|this|these|those|they|them|their|he|she|him|his|her)\b",
    re.IGNORECASE,
)
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_LINE = re.compile(r"\n\s*")


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

    The text to search for is the question, if the message has at most 128 tokens. In a longer one
    it is the last paragraph of the question, or its last line if no line is blank. The paragraphs
    before it are added while all have at most 32 tokens together, because "Thanks!" alone asks for
    nothing.

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
        cut = next(iter(_begins(_PARAGRAPH, message, earliest)), earliest)
    begins = [cut]
    if len(starts) > _MAX_SHORT_TOKENS:
        begins += _begins(_PARAGRAPH, message, cut) or _begins(_LINE, message, cut)
    joined = (b for b in begins if len(starts) - bisect_left(starts, b) <= _MAX_JOINED_TOKENS)
    text = query or message[next(joined, begins[-1]) :].strip()
    return Query(text=text, question=message[cut:], context=message[:cut])


def join_earlier(
    messages: Sequence[Message], token_offsets: TokenOffsets, *, budget_tokens: int
) -> str | None:
    """Return the last question behind those before it, as a text to search for.

    A short question that begins with "and" or names only "that" leaves out what it is about. The
    ones before it are added, back to one that does not, or to 128 tokens together. A question that
    leaves out nothing stays alone: None.

    Args:
        messages: The chat.
        token_offsets: As for `choose_query`, as is `budget_tokens`.
        budget_tokens: Budget of the retrieved context, in tokens.
    """
    asked = [message for message in reversed(messages) if message.role == "user"]
    if len(asked) < 2:
        return None
    questions, num_tokens = list[str](), 0
    for message in asked:
        chosen = choose_query(message.text, token_offsets, budget_tokens=budget_tokens)
        questions.append(chosen.text)
        length = len(token_offsets(chosen.text))
        num_tokens += length
        follows = length <= _MAX_FOLLOW_UP_TOKENS and _FOLLOWS.search(chosen.text)
        if not follows or num_tokens > _MAX_SHORT_TOKENS:
            break
    return " ".join(reversed(questions)) if len(questions) > 1 else None


def _begins(separator: re.Pattern[str], message: str, start: int) -> list[int]:
    """Return where each paragraph or line begins that follows a separator after `start`."""
    ends = (match.end() for match in separator.finditer(message, start))
    return [end for end in ends if end < len(message)]
