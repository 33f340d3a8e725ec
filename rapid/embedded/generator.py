"""Seeded documents, with questions whose answers follow from the text.

The embedded models understand this language and no other. A document is made of

* facts: `The harbor of Bakeno is dolu maki 482.`
* deposits of one name, scattered over the text: `The first deposit of Bakeno is 48 crates ...`
* entries, a paragraph of verse each: `Entry Bakeno: dolu maki sero ...`
* filler that mentions the same names and attributes, so that a search by words is sometimes misled.

Names and values are made of syllables: nothing can be answered without reading the document.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

QuestionKind = Literal["fact", "recite", "list"]
Span = tuple[int, int]

CHARACTERS_PER_TOKEN = 2.80
"""Of generated text under the embedded tokenizer; lets a length be asked in tokens without it."""

_SYLLABLES = tuple(c + v for c in "bdfghklmnprstvwz" for v in "aeiou")
_ATTRIBUTES = [
    "harbor",
    "vault",
    "engine",
    "garden",
    "archive",
    "signal",
    "bridge",
    "tower",
    "charter",
    "lantern",
    "ledger",
    "orchard",
    "keeper",
    "market",
    "river",
    "temple",
    "banner",
    "mirror",
    "anchor",
    "kitchen",
    "valley",
    "barrel",
    "candle",
    "window",
]
_ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth"]
_COUNTS = {3: "three", 4: "four", 5: "five", 6: "six"}
_CONTAINERS = ["crates", "barrels", "bags", "boxes", "sheets", "rolls"]
_PEOPLE = [
    "the baker",
    "the clerk",
    "a pilot",
    "the council",
    "an old judge",
    "the nurse",
    "a trader",
    "the captain",
    "a young singer",
    "the doctor",
]
_VERBS = [
    "walked past",
    "wrote about",
    "painted",
    "forgot",
    "measured",
    "praised",
    "visited",
    "closed",
    "bought",
    "repaired",
]
_PLACES = [
    "the station",
    "a quiet street",
    "the old mill",
    "an empty hall",
    "the northern road",
    "a small chapel",
    "the long wall",
    "the school",
    "a stone house",
    "the lake",
]
_TIMES = [
    "in the morning",
    "before noon",
    "at dusk",
    "during the storm",
    "last winter",
    "on a Friday",
    "after the war",
    "every spring",
]


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a document.

    `evidence` holds the `(start, end)` character offsets in the document's text of the sentences
    that the answer is made of. It is empty for a question that the text does not answer.
    """

    question: str
    answer: str
    kind: QuestionKind
    evidence: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class GeneratedDocument:
    """A document and every question that can be asked of it, in random order."""

    name: str
    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class DocumentMix:
    """Relative share of the text that each ingredient takes."""

    fact: float = 0.37
    recite: float = 0.22
    list: float = 0.17
    filler: float = 0.24


@dataclass(slots=True)
class _Draft:
    """Sentences and entries of a document before they have a place in it."""

    questions: list[tuple[QuestionKind, str, list[str]]] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    grouped: list[list[str]] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)


def generate_document(
    seed: int | str, num_tokens: int, *, mix: DocumentMix | None = None
) -> GeneratedDocument:
    """Return the document of `seed`, about `num_tokens` tokens long.

    The same arguments give the same document on any machine.
    """
    rng = random.Random(f"document {seed} {num_tokens}")
    draft = _draft(rng, num_tokens * CHARACTERS_PER_TOKEN, mix or DocumentMix())
    text = "\n\n".join(_paragraphs(rng, draft))
    questions = [
        Question(question, " ".join(parts), kind, tuple(_span(text, part) for part in parts))
        for kind, question, parts in draft.questions
    ]
    rng.shuffle(questions)
    return GeneratedDocument(_document_name(rng), text, tuple(questions))


def absent_questions(seed: int | str, document: GeneratedDocument, count: int) -> list[Question]:
    """Return questions that `document` does not answer, each with an arbitrary answer.

    For training only: a model that meets them learns to spread its probability, not to invent.
    """
    rng = random.Random(f"absent {seed}")
    known = [q.question.rstrip("?.").split(" ")[-1] for q in document.questions]
    questions: list[Question] = []
    while len(questions) < count:
        name = rng.choice(known) if known and rng.random() < 0.4 else _name(rng)
        kind: QuestionKind = rng.choices(("fact", "recite", "list"), (6, 1, 1))[0]
        if kind == "fact":
            attribute = rng.choice(_ATTRIBUTES)
            topic = f"{attribute} of {name} is"
            question, parts = _fact_question(rng, attribute, name), [_fact(rng, attribute, name)]
        elif kind == "recite":
            topic = f"Entry {name}:"
            question, parts = _recite_question(rng, name), [_entry(rng, name)]
        else:
            topic = f"deposit of {name} is"
            parts = _deposits(rng, name, (name,))
            question = _list_question(rng, name, len(parts))
        if topic not in document.text:
            questions.append(Question(question, " ".join(parts), kind, ()))
    return questions


def _draft(rng: random.Random, num_characters: float, mix: DocumentMix) -> _Draft:
    kinds = ("fact", "recite", "list", "filler")
    used = dict.fromkeys(kinds, 0)
    share = dict(zip(kinds, (mix.fact, mix.recite, mix.list, mix.filler), strict=True))
    names = _distinct(rng, max(4, int(num_characters / 90)))
    draft = _Draft()
    taken: set[tuple[str, str]] = set()
    # An entry or a list must fit; what it would overshoot by goes to facts and filler.
    longest = {"fact": 48, "recite": 160, "list": 330, "filler": 48}
    while (left := num_characters - sum(used.values())) > 24:
        fitting = [k for k in kinds if share[k] and (longest[k] <= left or k in ("fact", "filler"))]
        if not fitting:
            break
        # The ingredient furthest behind its share comes next, so that short documents vary by luck.
        kind = max(fitting, key=lambda k: share[k] * rng.random() * 2 - used[k] / num_characters)
        name = rng.choice(names)
        if kind == "fact":
            attribute = rng.choice(_ATTRIBUTES)
            if (attribute, name) in taken:
                continue
            taken.add((attribute, name))
            parts = [_fact(rng, attribute, name)]
            draft.questions.append(("fact", _fact_question(rng, attribute, name), parts))
            draft.loose += parts
        elif kind == "filler":
            parts = [_filler(rng, names)]
            draft.loose += parts
        elif (kind, name) in taken:
            continue
        elif kind == "recite":
            taken.add((kind, name))
            parts = [_entry(rng, name)]
            draft.questions.append(("recite", _recite_question(rng, name), parts))
            draft.entries += parts
        else:
            taken.add((kind, name))
            parts = _deposits(rng, name, names)
            draft.questions.append(("list", _list_question(rng, name, len(parts)), parts))
            draft.grouped.append(parts)
        used[kind] += sum(len(part) + 1 for part in parts)
    return draft


def _paragraphs(rng: random.Random, draft: _Draft) -> list[str]:
    """Scatter the sentences over paragraphs; deposits of one name keep their order."""
    owners: list[int] = [-1] * len(draft.loose)
    for group, parts in enumerate(draft.grouped):
        owners += [group] * len(parts)
    rng.shuffle(owners)
    loose = iter(rng.sample(draft.loose, len(draft.loose)))
    groups = [iter(parts) for parts in draft.grouped]
    sentences = [next(loose) if owner < 0 else next(groups[owner]) for owner in owners]
    paragraphs: list[str] = []
    while sentences:
        size = rng.randint(3, 5)
        paragraphs.append(" ".join(sentences[:size]))
        del sentences[:size]
    for entry in draft.entries:
        paragraphs.insert(rng.randint(0, len(paragraphs)), entry)
    return paragraphs


def _span(text: str, part: str) -> Span:
    start = text.index(part)
    return start, start + len(part)


def _word(rng: random.Random, num_syllables: int) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(num_syllables))


def _name(rng: random.Random) -> str:
    return _word(rng, rng.choice((2, 3))).capitalize()


def _distinct(rng: random.Random, count: int) -> tuple[str, ...]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[_name(rng)] = None
    return tuple(names)


def _value(rng: random.Random) -> str:
    words = " ".join(_word(rng, 2) for _ in range(rng.choice((1, 2, 2, 3))))
    return f"{words} {rng.randint(10, 999)}"


def _document_name(rng: random.Random) -> str:
    name = _name(rng)
    return rng.choice(("document.txt", "document", f"Chronicle of {name}", f"Notes from {name}"))


def _fact(rng: random.Random, attribute: str, name: str) -> str:
    return f"The {attribute} of {name} is {_value(rng)}."


def _fact_question(rng: random.Random, attribute: str, name: str) -> str:
    if rng.random() < 0.8:
        return f"What is the {attribute} of {name}?"
    return f"Tell me the {attribute} of {name}."


def _filler(rng: random.Random, names: Sequence[str]) -> str:
    name, time = rng.choice(names), rng.choice(_TIMES)
    style = rng.random()
    if style < 0.3:
        return f"Nobody asked about the {rng.choice(_ATTRIBUTES)} of {name} {time}."
    if style < 0.5:
        return f"The people of {name} {rng.choice(_VERBS)} {rng.choice(_PLACES)} {time}."
    person = rng.choice(_PEOPLE).capitalize()
    if style < 0.75:
        return f"{person} from {name} {rng.choice(_VERBS)} {rng.choice(_PLACES)}."
    return f"{person} {rng.choice(_VERBS)} {rng.choice(_PLACES)} {time}."


def _entry(rng: random.Random, name: str) -> str:
    """A verse in no language: only copying it word for word gives it back."""
    words = " ".join(_word(rng, 2) for _ in range(rng.randint(20, 27)))
    return f"Entry {name}: {words}."


def _recite_question(rng: random.Random, name: str) -> str:
    verb = "Recite" if rng.random() < 0.8 else "Repeat"
    return f"{verb} the entry {name}."


def _deposits(rng: random.Random, name: str, names: Sequence[str]) -> list[str]:
    return [
        f"The {ordinal} deposit of {name} is {rng.randint(10, 99)} {rng.choice(_CONTAINERS)} "
        f"of {_word(rng, 2)} {_word(rng, 2)}."
        for ordinal in _ORDINALS[: rng.choice((3, 4, 4, 5, 6))]
    ]


def _list_question(rng: random.Random, name: str, count: int) -> str:
    if rng.random() < 0.8:
        return f"List the {_COUNTS[count]} deposits of {name}."
    return f"What are the {_COUNTS[count]} deposits of {name}?"


def syllables() -> Iterator[str]:
    """Yield what names and values are made of, in each form that it takes in a word."""
    for syllable in _SYLLABLES:
        yield from (syllable, syllable.capitalize(), f" {syllable}", f" {syllable.capitalize()}")


def wording() -> Iterator[str]:
    """Yield every fixed phrase of the language, without names and values."""
    phrases = [*_ATTRIBUTES, *_ORDINALS, *_COUNTS.values(), *_CONTAINERS]
    phrases += [*_PEOPLE, *_VERBS, *_PLACES, *_TIMES]
    for phrase in phrases:
        yield from (f" {phrase}", phrase.capitalize())
    for phrase in [
        "What is the",
        " of",
        " is",
        "Tell me the",
        "Recite the entry",
        "Repeat the entry",
        "List the",
        " deposits of",
        "What are the",
        "The",
        " deposit of",
        "Entry",
        " in the year",
        "Then",
        "Later",
        " met",
        " near",
        "So",
        " paid",
        " to",
        "Now",
        " sells",
        "Nobody asked about the",
        "The people of",
        " from",
        "Chronicle of",
        "Notes from",
    ]:
        yield from (phrase, f" {phrase.lstrip()}")
    for phrase in (*_PEOPLE, "nobody"):
        yield f" {phrase.capitalize()}"
