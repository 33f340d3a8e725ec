"""What of an answer stands in its sources: word for word, or at least with most of its words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from heapq import nlargest

from rapid.chat_messages import Document
from rapid.citing.words import Word, is_content, split_statements, words
from rapid.ports import Passage
from rapid.receipt import Citation, EvidenceKind

_MOST_NEAR = 3  # passages that are masked: 2.9 % more rows of the drafter in the same benchmark


@dataclass(frozen=True, slots=True)
class CitingRule:
    """The least that counts as evidence, chosen by `benchmarks/results/cited_answers.md`."""

    # New words of a run that is copied; all about a topic, if it has all of the claim's new ones.
    least_words: int = 5
    most_rare: int = 8  # uses in the sources of a word for which such a run may be shorter
    least_overlap: float = 0.6  # share of a claim's new words in a passage that is `present`
    least_fall: float = 1.0  # nats that a claim loses without a passage that is `needed`
    least_gain: float = 0.1  # share of these in the nats that it has without the passage

    def is_needed(self, whole: float, part: float) -> bool:
        """Return whether a passage was needed, by log-likelihoods with all and without it."""
        return whole - part >= max(self.least_fall, -self.least_gain * part)

    def is_copy(self, run: Sequence[Word], claim: Claim, counts: Counter[str]) -> bool:
        """Return whether a run of a claim's words counts, in sources with so many of each word."""
        new = [word for word in run if word in claim.new]
        is_whole = len(new) == len(claim.new)
        is_rare = is_whole and any(counts[word.text] <= self.most_rare for word in new)
        told = [word for word in run if is_content(word.text)] if is_whole else new
        return is_rare or len(told) >= self.least_words


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement [start, stop) of an answer that says something, with its evidence so far.

    Attributes:
        told: Its words and signs.
        new: Those about a topic that the question lacks, or all about one if it lacks none.
    """

    choice: int
    start: int
    stop: int
    told: tuple[Word, ...]
    new: frozenset[Word]
    citations: list[Citation] = field(default_factory=list)

    def share(self, text: str) -> float:
        """Return the share of its new words that a text has."""
        new = {word.text.casefold() for word in self.new}
        return len(new & {word.text.casefold() for word in words(text)}) / len(new)

    def add(self, evidence: EvidenceKind, passage: Passage, fall: float | None = None) -> None:
        """Cite a whole passage, without the space around it."""
        quote = passage.text.strip()
        first = passage.start + passage.text.index(quote)
        place = passage.document, passage.id, first, first + len(quote), quote, fall
        self.citations.append(Citation(self.choice, self.start, self.stop, evidence, *place))


def find_claims(choice: int, answer: str, question: str) -> list[Claim]:
    """Return the statements of an answer that say something."""
    asked = {word.text.casefold() for word in words(question)}
    told, claims = words(answer), []
    for start, stop in split_statements(answer):
        own = tuple(word for word in told if start <= word.start < stop)
        content = frozenset(word for word in own if is_content(word.text))
        new = frozenset(word for word in content if word.text.casefold() not in asked)
        if content:
            claims.append(Claim(choice, start, stop, own, new or content))
    return claims


class _Text:
    """A passage, or a document without an id."""

    def __init__(self, document: str, passage_id: str | None, offset: int, text: str) -> None:
        self.document, self.passage_id, self.offset, self.text = document, passage_id, offset, text
        self.words = words(text)
        told = [word.text for word in self.words]
        self.matcher: SequenceMatcher[str] = SequenceMatcher(None, (), told, autojunk=False)


def find_copies(
    claims: Sequence[Claim],
    documents: Sequence[Document],
    passages: Sequence[Passage],
    rule: CitingRule,
) -> None:
    """Cite the longest parts of each claim that stand in passages or documents word for word.

    White space and signs of Markdown may differ. Of equal parts one in a passage counts.
    """
    texts = [_Text(each.document, each.id, each.start, each.text) for each in passages]
    texts += [_Text(each.name, None, 0, each.text) for each in documents]
    names = {document.name for document in documents}
    whole = (text for text in texts if not (text.passage_id and text.document in names))
    counts = Counter(word.text for text in whole for word in text.words)
    for claim in claims:
        for text in texts:
            text.matcher.set_seq1([word.text for word in claim.told])
        parts = [(0, len(claim.told))] if texts else []
        while parts:
            found = [(text.matcher.find_longest_match(*parts[-1]), text) for text in texts]
            (a, b, size), text = max(found, key=lambda each: each[0].size)
            low, high = parts.pop()
            if not size:
                continue
            parts += [(low, a), (a + size, high)]
            run, there = claim.told[a : a + size], text.words[b : b + size]
            if rule.is_copy(run, claim, counts):
                first, last = there[0].start, there[-1].stop
                own = claim.choice, run[0].start, run[-1].stop
                place = text.offset + first, text.offset + last, text.text[first:last]
                cited = Citation(*own, "copied", text.document, text.passage_id, *place)
                claim.citations.append(cited)
        claim.citations.sort(key=lambda citation: citation.start)


def find_near(claims: Sequence[Claim], passages: Sequence[Passage]) -> list[Passage]:
    """Return the few passages, in order, that share most new words with one of the claims."""
    shares = [max((claim.share(p.text) for claim in claims), default=0.0) for p in passages]
    best = nlargest(_MOST_NEAR, range(len(shares)), key=shares.__getitem__)
    return [passages[index] for index in sorted(best) if shares[index]]


def find_overlap(claim: Claim, passages: Sequence[Passage], rule: CitingRule) -> Passage | None:
    """Return the passage with most of a claim's new words, if it has enough of them."""
    best = max(passages, key=lambda passage: claim.share(passage.text), default=None)
    return best if best is not None and claim.share(best.text) >= rule.least_overlap else None
