"""A generator of seeded documents, with questions whose answers follow from the text.

A document is a chronicle, a contract, a clinical record or a ledger. Names and values are random
syllables, so no question can be answered without the document.
"""

import random
from dataclasses import dataclass, field
from typing import Literal

from rapid.embedded.wording import STYLES, DocumentKind
from rapid.embedded.writer import Writer

QuestionKind = Literal["fact", "recite", "list", "pair"]
Span = tuple[int, int]

CHARACTERS_PER_TOKEN = 2.80  # of chronicles; a test holds the lengths to 5 %
"""Characters per token of a chronicle, to size documents in tokens without the tokenizer.

The embedded tokenizer was made for chronicles: a contract has 2.5 characters per token, a clinical
record 2.35 and a ledger 2.2.
"""


@dataclass(frozen=True, slots=True)
class GeneratedQuestion:
    """One question about a document."""

    question: str
    answer: str
    kind: QuestionKind
    # Character offsets `(start, end)`, in the document's text, of the sentences that the answer is
    # made of; empty for a question that the text does not answer.
    evidence: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class GeneratedDocument:
    """A document with all questions about it, in random order."""

    name: str
    text: str
    questions: tuple[GeneratedQuestion, ...]
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
class _DocumentDraft:
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

    The same arguments give the same document on any machine.

    Raises:
        ValueError: `mix` contains pairs for a chronicle.
    """
    style = STYLES[kind]
    if mix and mix.pair and not style.link:
        raise ValueError(f"a {kind} has no pairs: take another kind, or a mix without them")
    prefix = "document" if kind == "chronicle" else kind
    rng = random.Random(f"{prefix} {seed} {num_tokens}")
    mix = mix or (_CHRONICLE_MIX if kind == "chronicle" else _PAIRS_MIX)
    writer = Writer(rng, style)
    draft = _draft(writer, num_tokens * CHARACTERS_PER_TOKEN, mix)
    text = "\n\n".join(_paragraphs(rng, draft))
    questions = [
        GeneratedQuestion(
            question, " ".join(parts), kind_of, tuple(_span(text, part) for part in parts)
        )
        for kind_of, question, parts in draft.questions
    ]
    rng.shuffle(questions)
    return GeneratedDocument(writer.document_name(), text, tuple(questions), kind)


def absent_questions(
    seed: int | str, document: GeneratedDocument, count: int
) -> list[GeneratedQuestion]:
    """Return questions that `document` does not answer, each with an arbitrary answer."""
    # For training only: a model learns from them to spread its probability, not to invent.
    rng = random.Random(f"absent {seed}")
    style = STYLES[document.kind]
    writer = Writer(rng, style)
    words = [word for q in document.questions for word in q.question.rstrip("?.").split(" ")[1:]]
    known = [word for word in words if word.istitle()]
    last: QuestionKind = "pair" if style.link else "recite"
    questions: list[GeneratedQuestion] = []
    while len(questions) < count:
        name = rng.choice(known) if known and rng.random() < 0.4 else writer.name()
        kind: QuestionKind = rng.choices(("fact", last, "list"), (6, 1, 1))[0]
        attribute = writer.attribute()
        if kind == "fact":
            topic = style.topic(style.fact, attribute=attribute, name=name)
            question, parts = writer.ask_fact(attribute, name)
        elif kind == "recite":
            topic = f"Entry {name}:"
            question, parts = writer.recite_question(name), [writer.entry(name)]
        elif kind == "pair":
            topic = style.topic(style.link, name=name, other="").rstrip(".")
            question, parts = writer.ask_pair(attribute, name, writer.name())
        else:
            topic = style.topic(style.deposit, ordinal="first", name=name)
            question, parts = writer.ask_list(name)
        if topic not in document.text:
            questions.append(GeneratedQuestion(question, " ".join(parts), kind, ()))
    return questions


def _draft(writer: Writer, num_characters: float, mix: DocumentMix) -> _DocumentDraft:
    rng = writer.rng
    kinds = ("fact", "recite", "list", "filler", "pair")
    used = dict.fromkeys(kinds, 0)
    shares = (mix.fact, mix.recite, mix.list, mix.filler, mix.pair)
    share = dict(zip(kinds, shares, strict=True))
    names = writer.distinct_names(max(4, int(num_characters / 90)))
    draft = _DocumentDraft()
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
            attribute = writer.attribute()
            if (attribute, name) in taken:
                continue
            taken.add((attribute, name))
            question, parts = writer.ask_fact(attribute, name)
            draft.questions.append(("fact", question, parts))
            draft.loose += parts
        elif kind == "filler":
            parts = [writer.filler(names)]
            draft.loose += parts
        elif (kind, name) in taken:
            continue
        elif kind == "recite":
            taken.add((kind, name))
            parts = [writer.entry(name)]
            draft.questions.append(("recite", writer.recite_question(name), parts))
            draft.entries += parts
        elif kind == "pair":
            attribute, other = writer.attribute(), rng.choice(names)
            if other == name or (attribute, other) in taken:
                continue
            taken |= {(kind, name), (attribute, other)}
            question, parts = writer.ask_pair(attribute, name, other)
            draft.questions.append(("pair", question, parts))
            draft.loose += parts
        else:
            taken.add((kind, name))
            question, parts = writer.ask_list(name)
            draft.questions.append(("list", question, parts))
            draft.grouped.append(parts)
        used[kind] += sum(len(part) + 1 for part in parts)
    return draft


def _paragraphs(rng: random.Random, draft: _DocumentDraft) -> list[str]:
    """Return paragraphs of the sentences in random order; those of one group stay in sequence."""
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
