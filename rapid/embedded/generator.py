"""A generator of seeded documents, with questions whose answers follow from the text.

The embedded models understand this language and no other. A document is made of

* facts: `The harbor of Bakeno is dolu maki 482.`
* deposits of one name, scattered over the text: `The first deposit of Bakeno is 48 crates ...`
* entries, a paragraph of verse each: `Entry Bakeno: dolu maki sero ...`
* pairs of places that one question needs: `The twin of patient Bakeno is Tozemi.` and, elsewhere,
  `The pulse in patient Tozemi was dolu maki 482.`
* filler that mentions the same names and attributes, so that a search by words is sometimes misled.

A document is of one kind: a chronicle, a contract, a clinical record or a ledger. The kinds differ
in their wording; entries are in chronicles only, pairs in the others.

Names and values are made of random syllables, so no question can be answered without the document.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

QuestionKind = Literal["fact", "recite", "list", "pair"]
DocumentKind = Literal["chronicle", "contract", "clinical", "ledger"]
Span = tuple[int, int]

CHARACTERS_PER_TOKEN = 2.80
"""Characters per token of a chronicle, to size documents in tokens without the tokenizer.

The embedded tokenizer was made for chronicles: a contract has 2.5 characters per token, a clinical
record 2.35 and a ledger 2.2.
"""

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
_DUES = (
    "rent", "fee", "bond", "tax", "toll", "wool", "salt", "oil", "wine", "tea", "grain", "iron",
)  # fmt: skip
_FINDINGS = (
    "pulse", "fever", "dose", "bone", "sight", "cough", "skin", "heart", "eye", "sleep",
    "blood", "ward",
)  # fmt: skip
_GOODS = (
    "gold", "sugar", "silver", "copper", "bread", "coal", "milk", "rice", "honey", "paper",
    "fish", "rope",
)  # fmt: skip
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
class _Style:
    """The wording of one kind of document: templates of sentences and of their questions."""

    attributes: tuple[str, ...]
    fact: str
    fact_questions: tuple[str, str]
    deposit: str
    list_questions: tuple[str, str]
    aside: str
    link: str = ""
    pair_question: str = ""

    def topic(self, template: str, **names: str) -> str:
        """Return the beginning of a sentence, up to the value that its question is about."""
        return template.split("{value}")[0].split("{count}")[0].format(**names)


_STYLES: dict[DocumentKind, _Style] = {
    "chronicle": _Style(
        attributes=tuple(_ATTRIBUTES),
        fact="The {attribute} of {name} is {value}.",
        fact_questions=(
            "What is the {attribute} of {name}?",
            "Tell me the {attribute} of {name}.",
        ),
        deposit="The {ordinal} deposit of {name} is {count} {container} of {value}.",
        list_questions=(
            "List the {number} deposits of {name}.",
            "What are the {number} deposits of {name}?",
        ),
        aside="Nobody asked about the {attribute} of {name} {time}.",
    ),
    "contract": _Style(
        attributes=_DUES,
        fact="The {attribute} due from {name} is {value}.",
        fact_questions=(
            "What is the {attribute} due from {name}?",
            "Tell me the {attribute} due from {name}.",
        ),
        deposit="The {ordinal} part of the debt of {name} is {count} {container} of {value}.",
        list_questions=(
            "List the {number} parts of the debt of {name}.",
            "What are the {number} parts of the debt of {name}?",
        ),
        aside="Nobody must pay the {attribute} for {name} {time}.",
        link="The bail for {name} is {other}.",
        pair_question="What is the {attribute} due from the bail for {name}?",
    ),
    "clinical": _Style(
        attributes=_FINDINGS,
        fact="The {attribute} in patient {name} was {value}.",
        fact_questions=(
            "What was the {attribute} in patient {name}?",
            "Tell me the {attribute} in patient {name}.",
        ),
        deposit="The {ordinal} visit to patient {name} was {count} {container} of {value}.",
        list_questions=(
            "List the {number} visits to patient {name}.",
            "What were the {number} visits to patient {name}?",
        ),
        aside="The nurse saw no {attribute} in patient {name} {time}.",
        link="The twin of patient {name} is {other}.",
        pair_question="What was the {attribute} in the twin of patient {name}?",
    ),
    "ledger": _Style(
        attributes=_GOODS,
        fact="On page {name}, {attribute}: {value}.",
        fact_questions=(
            "What is on page {name} for {attribute}?",
            "Tell me what is on page {name} for {attribute}.",
        ),
        deposit="On page {name}, {ordinal} sale: {count} {container} of {value}.",
        list_questions=(
            "List the {number} sales on page {name}.",
            "What are the {number} sales on page {name}?",
        ),
        aside="Nobody paid for {attribute} from page {name} {time}.",
        link="After page {name} comes page {other}.",
        pair_question="What is on the page after {name} for {attribute}?",
    ),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a document.

    Attributes:
        evidence: Character offsets `(start, end)`, in the document's text, of the sentences that
            the answer is made of; empty for a question that the text does not answer.
    """

    question: str
    answer: str
    kind: QuestionKind
    evidence: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class GeneratedDocument:
    """A document with all questions about it, in random order."""

    name: str
    text: str
    questions: tuple[Question, ...]
    kind: DocumentKind = "chronicle"


@dataclass(frozen=True, slots=True)
class DocumentMix:
    """The relative share of the text that each ingredient takes."""

    fact: float = 0.37
    recite: float = 0.22
    list: float = 0.17
    filler: float = 0.24
    pair: float = 0.0


_CHRONICLE_MIX = DocumentMix()
_PAIRS_MIX = DocumentMix(fact=0.29, recite=0.0, list=0.2, filler=0.21, pair=0.3)


@dataclass(slots=True)
class _Draft:
    """The sentences and entries of a document before they are ordered."""

    questions: list[tuple[QuestionKind, str, list[str]]] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    grouped: list[list[str]] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)


def generate_document(
    seed: int | str,
    num_tokens: int,
    *,
    kind: DocumentKind = "chronicle",
    mix: DocumentMix | None = None,
) -> GeneratedDocument:
    """Return the document of `seed`, about `num_tokens` tokens long if it is a chronicle.

    A contract of as many characters has about 13 % more tokens, a clinical record 20 % and a ledger
    27 %. The same arguments give the same document on any machine.

    Raises:
        ValueError: `mix` contains pairs for a chronicle.
    """
    if mix and mix.pair and not _STYLES[kind].link:
        raise ValueError(f"a {kind} has no pairs: take another kind, or a mix without them")
    prefix = "document" if kind == "chronicle" else kind
    rng = random.Random(f"{prefix} {seed} {num_tokens}")
    mix = mix or (_CHRONICLE_MIX if kind == "chronicle" else _PAIRS_MIX)
    draft = _draft(rng, num_tokens * CHARACTERS_PER_TOKEN, mix, _STYLES[kind])
    text = "\n\n".join(_paragraphs(rng, draft))
    questions = [
        Question(question, " ".join(parts), kind_of, tuple(_span(text, part) for part in parts))
        for kind_of, question, parts in draft.questions
    ]
    rng.shuffle(questions)
    return GeneratedDocument(_document_name(rng), text, tuple(questions), kind)


def absent_questions(seed: int | str, document: GeneratedDocument, count: int) -> list[Question]:
    """Return questions that `document` does not answer, each with an arbitrary answer.

    They are for training only: a model learns from them to spread its probability, not to invent.
    """
    rng = random.Random(f"absent {seed}")
    style = _STYLES[document.kind]
    words = [word for q in document.questions for word in q.question.rstrip("?.").split(" ")[1:]]
    known = [word for word in words if word.istitle()]
    last: QuestionKind = "pair" if style.link else "recite"
    questions: list[Question] = []
    while len(questions) < count:
        name = rng.choice(known) if known and rng.random() < 0.4 else _name(rng)
        kind: QuestionKind = rng.choices(("fact", last, "list"), (6, 1, 1))[0]
        attribute = rng.choice(style.attributes)
        if kind == "fact":
            topic = style.topic(style.fact, attribute=attribute, name=name)
            parts = [_fact(rng, style, attribute, name)]
            question = _either(rng, style.fact_questions, attribute=attribute, name=name)
        elif kind == "recite":
            topic = f"Entry {name}:"
            question, parts = _recite_question(rng, name), [_entry(rng, name)]
        elif kind == "pair":
            other = _name(rng)
            topic = style.topic(style.link, name=name, other="").rstrip(".")
            parts = [_link(style, name, other), _fact(rng, style, attribute, other)]
            question = style.pair_question.format(attribute=attribute, name=name)
        else:
            topic = style.topic(style.deposit, ordinal="first", name=name)
            parts = _deposits(rng, style, name)
            question = _list_question(rng, style, name, len(parts))
        if topic not in document.text:
            questions.append(Question(question, " ".join(parts), kind, ()))
    return questions


def _draft(rng: random.Random, num_characters: float, mix: DocumentMix, style: _Style) -> _Draft:
    kinds = ("fact", "recite", "list", "filler", "pair")
    used = dict.fromkeys(kinds, 0)
    shares = (mix.fact, mix.recite, mix.list, mix.filler, mix.pair)
    share = dict(zip(kinds, shares, strict=True))
    names = _distinct(rng, max(4, int(num_characters / 90)))
    draft = _Draft()
    taken: set[tuple[str, str]] = set()
    # An entry or a list must fit as a whole; the remaining characters go to facts and filler.
    longest = {"fact": 48, "recite": 160, "list": 330, "filler": 48, "pair": 100}
    while (left := num_characters - sum(used.values())) > 24:
        fitting = [k for k in kinds if share[k] and (longest[k] <= left or k in ("fact", "filler"))]
        if not fitting:
            break
        # The ingredient furthest behind its share comes next, with noise to vary short documents.
        kind = max(fitting, key=lambda k: share[k] * rng.random() * 2 - used[k] / num_characters)
        name = rng.choice(names)
        if kind == "fact":
            attribute = rng.choice(style.attributes)
            if (attribute, name) in taken:
                continue
            taken.add((attribute, name))
            parts = [_fact(rng, style, attribute, name)]
            question = _either(rng, style.fact_questions, attribute=attribute, name=name)
            draft.questions.append(("fact", question, parts))
            draft.loose += parts
        elif kind == "filler":
            parts = [_filler(rng, style, names)]
            draft.loose += parts
        elif (kind, name) in taken:
            continue
        elif kind == "recite":
            taken.add((kind, name))
            parts = [_entry(rng, name)]
            draft.questions.append(("recite", _recite_question(rng, name), parts))
            draft.entries += parts
        elif kind == "pair":
            attribute, other = rng.choice(style.attributes), rng.choice(names)
            if other == name or (attribute, other) in taken:
                continue
            taken |= {(kind, name), (attribute, other)}
            parts = [_link(style, name, other), _fact(rng, style, attribute, other)]
            question = style.pair_question.format(attribute=attribute, name=name)
            draft.questions.append(("pair", question, parts))
            draft.loose += parts
        else:
            taken.add((kind, name))
            parts = _deposits(rng, style, name)
            draft.questions.append(("list", _list_question(rng, style, name, len(parts)), parts))
            draft.grouped.append(parts)
        used[kind] += sum(len(part) + 1 for part in parts)
    return draft


def _paragraphs(rng: random.Random, draft: _Draft) -> list[str]:
    """Return paragraphs with the sentences in random order; deposits of one name keep theirs."""
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


def _fact(rng: random.Random, style: _Style, attribute: str, name: str) -> str:
    return style.fact.format(attribute=attribute, name=name, value=_value(rng))


def _link(style: _Style, name: str, other: str) -> str:
    return style.link.format(name=name, other=other)


def _either(rng: random.Random, templates: tuple[str, str], **words: str) -> str:
    return templates[0 if rng.random() < 0.8 else 1].format(**words)


def _filler(rng: random.Random, style: _Style, names: Sequence[str]) -> str:
    name, time = rng.choice(names), rng.choice(_TIMES)
    form = rng.random()
    if form < 0.3:
        return style.aside.format(attribute=rng.choice(style.attributes), name=name, time=time)
    if form < 0.5:
        return f"The people of {name} {rng.choice(_VERBS)} {rng.choice(_PLACES)} {time}."
    person = rng.choice(_PEOPLE).capitalize()
    if form < 0.75:
        return f"{person} from {name} {rng.choice(_VERBS)} {rng.choice(_PLACES)}."
    return f"{person} {rng.choice(_VERBS)} {rng.choice(_PLACES)} {time}."


def _entry(rng: random.Random, name: str) -> str:
    """Return a verse of random words, which can only be reproduced by copying it verbatim."""
    words = " ".join(_word(rng, 2) for _ in range(rng.randint(20, 27)))
    return f"Entry {name}: {words}."


def _recite_question(rng: random.Random, name: str) -> str:
    verb = "Recite" if rng.random() < 0.8 else "Repeat"
    return f"{verb} the entry {name}."


def _deposits(rng: random.Random, style: _Style, name: str) -> list[str]:
    return [
        style.deposit.format(
            ordinal=ordinal,
            name=name,
            count=rng.randint(10, 99),
            container=rng.choice(_CONTAINERS),
            value=f"{_word(rng, 2)} {_word(rng, 2)}",
        )
        for ordinal in _ORDINALS[: rng.choice((3, 4, 4, 5, 6))]
    ]


def _list_question(rng: random.Random, style: _Style, name: str, count: int) -> str:
    return _either(rng, style.list_questions, number=_COUNTS[count], name=name)


def syllables() -> Iterator[str]:
    """Yield the syllables of names and values, in each form that they take in a word."""
    for syllable in _SYLLABLES:
        yield from (syllable, syllable.capitalize(), f" {syllable}", f" {syllable.capitalize()}")


def wording() -> Iterator[str]:
    """Yield every fixed phrase of chronicles, without names and values.

    The tokenizer was trained on these phrases and does not change with new kinds of documents; it
    spells the wording of the other kinds.
    """
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
