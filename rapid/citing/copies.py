"""What of an answer stands in its sources: word for word, or at least with most of its words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rapid.citing.words import Span, Word, split_statements, words
from rapid.messages import Document
from rapid.ports import Passage


@dataclass(frozen=True, slots=True)
class CitingRule:
    """The least that counts as evidence, by `benchmarks/method/citations.py`.

    A word is new if it says something about a topic and the question does not have it.

    Attributes:
        least_words: New words of a run that is copied; where it has all of the statement's, words
            about a topic.
        most_rare: How often the sources may have a name or number for which a shorter run counts.
        least_share: Share of the statement's new words that such a run has.
        least_overlap: Share of the statement's new words that a passage has where it is `present`.
        least_fall: Nats that a statement's likelihood loses without a passage that it needed.
    """

    least_words: int = 4
    most_rare: int = 2
    least_share: float = 0.5
    least_overlap: float = 0.6
    least_fall: float = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a document, characters [start, stop), with its words."""

    document: str
    start: int
    stop: int
    quote: str
    passage_id: str | None = None  # the retrieved passage with most of it, if any


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of an answer that says something, and where it was copied from.

    Attributes:
        told: Its words and signs.
        new: Those about a topic that the question lacks, or all about one if it lacks none.
        copies: Parts of the statement with the places where they stand.
    """

    span: Span
    told: tuple[Word, ...]
    new: tuple[Word, ...]
    copies: list[tuple[Span, Place]] = field(default_factory=list)

    @property
    def is_copied(self) -> bool:
        """Whether all its new words are copied."""
        return all(any(a <= word.start < b for (a, b), _ in self.copies) for word in self.new)


def find_claims(answer: str, question: str) -> list[Claim]:
    """Return the statements of an answer that say something."""
    asked = {word.text.casefold() for word in words(question)}
    told = words(answer)
    claims = []
    for start, stop in split_statements(answer):
        own = tuple(word for word in told if start <= word.start < stop)
        content = tuple(word for word in own if word.is_content)
        new = tuple(word for word in content if word.text.casefold() not in asked)
        if content:
            claims.append(Claim((start, stop), own, new or content))
    return claims


class _Text:
    """A source: a document, or a passage of one that is not attached, which begins at `offset`."""

    def __init__(self, document: str, text: str, offset: int, wanted: set[str]) -> None:
        self.document, self.text, self.offset = document, text, offset
        self.words = words(text)
        self.places: dict[str, list[int]] = {}  # of the wanted words, by index
        for index, word in enumerate(self.words):
            if word.text in wanted:
                self.places.setdefault(word.text, []).append(index)

    def extend(self, told: Sequence[Word], at: int, index: int) -> tuple[int, int, int]:
        """Return the longest run [first, stop) of `told` around a word, and where it stands."""
        first, stop, start = at, at + 1, index
        while first and start and told[first - 1].text == self.words[start - 1].text:
            first, start = first - 1, start - 1
        for more, other in zip(told[stop:], islice(self.words, index + 1, None), strict=False):
            if more.text != other.text:
                break
            stop += 1
        return first, stop, start

    def place(self, start: int, count: int, passages: Iterable[Passage]) -> Place:
        """Return the place of `count` words from an index on."""
        a, b = self.words[start].start, self.words[start + count - 1].stop
        first, stop = a + self.offset, b + self.offset
        shared = {
            each.id: min(stop, each.end) - max(first, each.start)
            for each in passages
            if each.document == self.document and each.start < stop and first < each.end
        }
        best = max(shared, key=shared.__getitem__, default=None)
        return Place(self.document, first, stop, self.text[a:b], best)


def find_copies(
    claims: Sequence[Claim],
    documents: Sequence[Document],
    passages: Sequence[Passage],
    rule: CitingRule,
) -> None:
    """Add to each claim what of it stands in the documents or passages word for word.

    White space and Markdown's signs around words may differ. Of equal runs one in a passage counts.
    """
    wanted = {word.text for claim in claims for word in claim.new}
    attached = {document.name for document in documents}
    texts = [_Text(each.name, each.text, 0, wanted) for each in documents]
    texts += [
        _Text(each.document, each.text, each.start, wanted)
        for each in passages
        if each.document not in attached
    ]
    counts = {word: sum(len(text.places.get(word, ())) for text in texts) for word in wanted}
    for claim in claims:
        claim.copies.extend(_copies(claim, texts, passages, counts, rule))


def _copies(
    claim: Claim,
    texts: Sequence[_Text],
    passages: Sequence[Passage],
    counts: dict[str, int],
    rule: CitingRule,
) -> Iterator[tuple[Span, Place]]:
    """Yield the longest runs of a claim that count, each with words that no longer one has."""
    told, new = claim.told, set(claim.new)
    runs: dict[tuple[int, int], dict[tuple[int, int], None]] = {}  # their places: text, index
    for at, word in enumerate(told):
        for number, text in enumerate(texts if word in new else ()):
            for index in text.places.get(word.text, ()):
                first, stop, start = text.extend(told, at, index)
                runs.setdefault((first, stop), {})[number, start] = None
    explained: set[Word] = set()
    for first, stop in sorted(runs, key=lambda run: (run[0] - run[1], run[0])):
        own = [word for word in told[first:stop] if word in new]
        is_rare = any(word.is_name and counts[word.text] <= rule.most_rare for word in own)
        is_enough = is_rare and len(own) >= rule.least_share * len(new)
        content = sum(word.is_content for word in told[first:stop])
        is_long = (content if len(own) == len(new) else len(own)) >= rule.least_words
        if explained.issuperset(own) or not (is_long or is_enough):
            continue
        explained.update(own)
        places = [
            texts[number].place(start, stop - first, passages)
            for number, start in runs[first, stop]
        ]
        yield (
            (told[first].start, told[stop - 1].stop),
            next((each for each in places if each.passage_id is not None), places[0]),
        )


def find_overlap(claim: Claim, passages: Sequence[Passage], rule: CitingRule) -> Passage | None:
    """Return the passage with most of a claim's new words, if it has enough of them."""
    new = {word.text.casefold() for word in claim.new}
    found: tuple[int, Passage | None] = 0, None
    for passage in passages:
        number = len(new & {word.text.casefold() for word in words(passage.text)})
        found = (number, passage) if number > found[0] else found
    number, best = found
    return best if number >= rule.least_overlap * len(new) else None


def place_of(passage: Passage) -> Place:
    """Return the place of a whole passage without the space around it."""
    text = passage.text
    start = passage.start + len(text) - len(text.lstrip())
    quote = text.strip()
    return Place(passage.document, start, start + len(quote), quote, passage.id)
