"""Terms: the words and numbers of a text, those of a question that carry its content, and names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from rapid.citing.words import CJK, FUNCTION_WORDS

_TERM = re.compile(rf"([{CJK}]+)|[^\W_{CJK}]+")
_SENTENCE_END = re.compile(r"[.!?:]\s")


def terms(text: str) -> Iterator[str]:
    """Yield case-folded words and numbers, and pairs of neighbours where no spaces are written.

    There is no stemming, so no language is preferred.
    """
    for match in _TERM.finditer(unicodedata.normalize("NFKC", text).casefold()):
        yield from _terms_of(match)


def content_terms(question: str) -> list[str]:
    """Return the terms of a question without function words, or all if it has no others."""
    found = list(terms(question))
    return [term for term in found if term not in FUNCTION_WORDS] or found


def names(question: str) -> set[str]:
    """Return terms that look like names or numbers: with a digit, or a capital within a sentence.

    The first word of a sentence counts only if it has a digit.
    """
    text = unicodedata.normalize("NFKC", question)
    found: set[str] = set()
    end = 0  # of the word before
    for match in _TERM.finditer(text):
        word = match.group()
        is_first = end == 0 or _SENTENCE_END.search(text, end, match.start())
        if any(map(str.isdigit, word)) or (word[0].isupper() and not is_first):
            found.add(word.casefold())
        end = match.end()
    return found


def _terms_of(match: re.Match[str]) -> Iterator[str]:
    run = match.group()
    if match.group(1) is None or len(run) == 1:
        yield run
    else:
        yield from (run[i : i + 2] for i in range(len(run) - 1))
