"""Terms: the words and numbers of a text, those of a question that carry its content, and names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

# Words that say nothing about a question's topic. Inverse document frequency cannot replace the
# list: "what" and "please" are rare in documents, and would outweigh the names in the question.
_FUNCTION_WORDS = frozenset(
    """
    a all an and any are as at be been but by can could did do does for from had has have he her his
    how i if in into is it its ll many me much my no not of on or our please re s say she should so
    some such t tell than that the their them then there these they this those to us ve was we were
    what when where which who whom whose why will with would you your
    """.split()  # noqa: SIM905
)
_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_TERM = re.compile(rf"([{_CJK}]+)|[^\W_{_CJK}]+")
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
    return [term for term in found if term not in _FUNCTION_WORDS] or found


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
