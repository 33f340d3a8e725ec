"""The words of a text with their places, and the statements that it makes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # characters that are written without spaces
# Words that say nothing about a topic. Inverse document frequency cannot replace the list: "what"
# and "please" are rare in documents, and would outweigh the names in a question.
FUNCTION_WORDS = frozenset(
    """
    a all an and any are as at be been but by can could did do does for from had has have he her his
    how i if in into is it its ll many me much my no not of on or our please re s say she should so
    some such t tell than that the their them then there these they this those to us ve was we were
    what when where which who whom whose why will with would you your
    """.split()  # noqa: SIM905
)
# Words, single characters of CJK, and signs except those that Markdown marks words with.
_WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+|[^\w\s*`]")
_END = re.compile(r"""[.!?]["'”’)\]*_]*(?=\s)|[。！？]|\n""")
# What stands before a full stop that ends no statement: an initial, a title, a list's number.
_SHORT = re.compile(
    r"(?:[\s(][A-Za-z]|\b(?:e\.g|i\.e|cf|vs|mr|mrs|ms|dr|prof|st|fig)|(?:^|\n)\s*\d{1,3})\.$", re.I
)


class Word(NamedTuple):
    """A word or a sign of a text, at the characters [start, stop)."""

    text: str
    start: int
    stop: int


def is_content(word: str) -> bool:
    """Return whether a word says something about a topic."""
    return word[0].isalnum() and word.casefold() not in FUNCTION_WORDS


def words(text: str) -> list[Word]:
    """Return the words and signs of a text, in order."""
    return [Word(each.group(), *each.span()) for each in _WORD.finditer(text)]


def split_statements(text: str) -> Iterator[tuple[int, int]]:
    """Yield the place of each sentence or line of a text, without the space around it."""
    ends = [found.span() for found in _END.finditer(text)]
    start = 0
    for dot, end in (*ends, (len(text), len(text))):
        part = text[start:end]
        if _SHORT.search(text, max(0, dot - 8), dot + 1):
            continue
        if part.strip():
            yield start + len(part) - len(part.lstrip()), start + len(part.rstrip())
        start = end
