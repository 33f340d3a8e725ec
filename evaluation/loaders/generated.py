"""Loader of questions on generated documents, which the embedded models can read.

``Source.split`` is part of every document's seed: eta is chosen on ``dev``, results are measured on
``test``, and models are trained on none. ``test 2`` is for choices made after looking at ``test``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, cycle, islice
from pathlib import Path
from typing import Annotated, get_args

from pydantic import Field

from evaluation.items import Item
from evaluation.tasks import Source
from rapid.chat_messages import Document, Message
from rapid.config import Frozen
from rapid.embedded.generator import (
    CHARACTERS_PER_TOKEN,
    GeneratedDocument,
    GeneratedQuestion,
    QuestionKind,
    generate_document,
)
from rapid.embedded.wording import DocumentKind
from rapid.errors import ConfigurationError
from rapid.prompts import target_messages

SPLITS = ("dev", "test", "test 2", "test 3")
DOCUMENT_SHARE = 0.6
"""The document's share of a conversation. Earlier questions and answers fill the rest, as in the
models' training."""


class GeneratedOptions(Frozen):
    """The ``Source.options`` of a task on generated documents.

    Attributes:
        lengths: Number of items by approximate length in tokens.
        questions: Kinds of questions; only chronicles have recite questions, and only the other
            documents have pair questions.
        conversations: With 0, an item is one question about an attached document. Otherwise the
            long text is a dialogue of this many conversations, each about a document that its first
            turn quotes, and the last conversation ends in the item's question.
        seed: Gives other documents than the split's own, which no choice has seen.
    """

    lengths: dict[Annotated[int, Field(ge=200)], Annotated[int, Field(ge=1)]] = Field(min_length=1)
    documents: tuple[DocumentKind, ...] = Field(get_args(DocumentKind), min_length=1)
    questions: tuple[QuestionKind, ...] = Field(get_args(QuestionKind), min_length=1)
    conversations: int = Field(0, ge=0)
    seed: int | None = None


def load(source: Source, data: Path | None) -> Iterator[Item]:
    """Yield the items of `source`, the same on any machine.

    Raises:
        ConfigurationError: The options are not valid, the split is unknown, or `data` is given.
    """
    if data is not None:
        raise ConfigurationError(f"generated documents are read from no file: leave out {data}")
    if source.split not in SPLITS:
        raise ConfigurationError(
            f"source.split is {source.split!r}; use one of {', '.join(SPLITS)}"
        )
    options = source.check_options(GeneratedOptions, "generated documents")
    split = source.split if options.seed is None else f"{source.split} seed {options.seed}"
    lengths = [_of_length(split, n, options) for n in options.lengths]
    left = dict(enumerate(options.lengths.values()))
    while left:
        for index in list(left):
            yield next(lengths[index])
            left[index] -= 1
            if not left[index]:
                del left[index]


def _of_length(split: str, num_tokens: int, options: GeneratedOptions) -> Iterator[Item]:
    """Yield items of about `num_tokens` tokens without end."""
    pairs = [
        (document, question)
        for question in options.questions
        for document in options.documents
        if not (question == "recite" and document != "chronicle")
        and not (question == "pair" and document == "chronicle")
    ]
    if not pairs:
        raise ConfigurationError(
            "source.options: these documents have no such questions; "
            "recite is asked of chronicles, pair of the others"
        )
    for number, (kind, question) in enumerate(cycle(pairs)):
        name = f"{split}-{num_tokens}-{kind}-{question}-{number // len(pairs):03}"
        groups = {
            "length": str(num_tokens),
            "document": kind,
            "question": question,
            "places": "one" if question in ("fact", "recite") else "several",
        }
        if options.conversations:
            yield _dialogue(name, groups, kind, question, num_tokens, options.conversations)
        else:
            yield _single(name, groups, kind, question, num_tokens)


def _single(
    name: str, groups: dict[str, str], kind: DocumentKind, question: QuestionKind, num_tokens: int
) -> Item:
    document, asked = _document_with(name, kind, question, num_tokens)
    return Item(
        id=name,
        messages=(Message("user", asked.question),),
        document=Document(document.name, document.text),
        answers=(asked.answer,),
        groups=groups,
        evidence=asked.evidence,
    )


def _dialogue(
    name: str,
    groups: dict[str, str],
    kind: DocumentKind,
    question: QuestionKind,
    num_tokens: int,
    conversations: int,
) -> Item:
    share = num_tokens // conversations
    size = int(DOCUMENT_SHARE * share)
    document, asked = _document_with(name, kind, question, size)
    rng = random.Random(name)
    messages = list[Message]()
    for number in range(conversations - 1):
        other_kind = rng.choice(get_args(DocumentKind))
        other = generate_document(f"{name} other {number}", size, kind=other_kind)
        messages += _turns(other, list(other.questions), share)
    others = [each for each in document.questions if each is not asked]
    messages += _turns(document, others, share)
    return Item(
        id=name,
        messages=(*messages, Message("user", asked.question)),
        document=None,
        answers=(asked.answer,),
        groups=groups,
    )


def _turns(
    document: GeneratedDocument, questions: list[GeneratedQuestion], num_tokens: int
) -> Iterator[Message]:
    """Yield the document and its questions with their answers, until `num_tokens` are reached."""
    left = num_tokens * CHARACTERS_PER_TOKEN - len(document.text)
    attached = [Document(document.name, document.text)]
    for each in questions:
        yield from target_messages([Message("user", each.question)], attached)
        yield Message("assistant", each.answer)
        attached = []
        left -= len(each.question) + len(each.answer)
        if left <= 0:
            return


def _document_with(
    seed: str, kind: DocumentKind, question: QuestionKind, num_tokens: int
) -> tuple[GeneratedDocument, GeneratedQuestion]:
    """Return the first document of `seed` that has a question of this kind, and the question."""
    for attempt in islice(count(), 100):
        document = generate_document(f"{seed} {attempt}", num_tokens, kind=kind)
        for each in document.questions:
            if each.kind == question:
                return document, each
    raise ConfigurationError(
        f"documents of {num_tokens} tokens have no {question} question: ask for longer ones"
    )
