"""Loader of the questions on real text that the package carries: documentation and licences.

``Source.split`` is ``dev`` or ``test``, by a hash of the document's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import product
from math import log2
from pathlib import Path
from typing import get_args

from pydantic import Field

from evaluation.items import Item
from evaluation.tasks import Source
from evaluation.texts.text_questions import (
    Kind,
    TextQuestion,
    document_names,
    document_text,
    questions_of,
    span_of,
)
from rapid.chat_messages import Document, Message
from rapid.config import Frozen
from rapid.errors import ConfigurationError

SPLITS = ("dev", "test")
DEV_SHARE = 0.25
CHARACTERS_PER_TOKEN = 3.9
"""Of these documents under SmolLM2's tokenizer; only names the group `length`."""
NOT_IN_THE_TEXT = (
    "not in the text",
    "not stated",
    "not mentioned",
    "not specified",
    "not provided",
    "does not say",
    "does not mention",
    "does not specify",
    "does not provide",
    "doesn't say",
    "doesn't mention",
    "doesn't specify",
)


class RealTextOptions(Frozen):
    """The ``Source.options`` of a task on real text.

    Attributes:
        per_document: Greatest number of questions about one document, evenly spread over the kinds;
            None asks all.
    """

    kinds: tuple[Kind, ...] = Field(get_args(Kind), min_length=1)
    per_document: int | None = Field(None, ge=1)


def load(source: Source, data: Path | None) -> Iterator[Item]:
    """Yield the items of a split, document by document, so that what was read can be used again.

    Raises:
        ConfigurationError: The split is unknown, the options are not valid, or `data` was given.
    """
    if data is not None:
        raise ConfigurationError("the documents of real-text come with the package: drop --data")
    if source.split not in SPLITS:
        raise ConfigurationError(f"real-text has the splits {', '.join(SPLITS)}: set source.split")
    options = source.check_options(RealTextOptions, "real-text")
    for name in document_names():
        if split_of(name) == source.split:
            asked = [each for each in questions_of(name) if each.kind in options.kinds]
            number = min(options.per_document or len(asked), len(asked))
            yield from (_item(asked[i * len(asked) // number]) for i in range(number))


def split_of(document: str) -> str:
    """Return the split that a document belongs to."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return SPLITS[int.from_bytes(digest, "big") >= DEV_SHARE * 2**64]


def _item(question: TextQuestion) -> Item:
    text = document_text(question.document)
    spans = (span_of(passage, text) for passage in question.evidence)
    answers = tuple("\n".join(parts) for parts in product(*question.answer))
    return Item(
        id=question.id,
        messages=(Message("user", question.question),),
        document=Document(question.document, text),
        answers=answers if question.answer else NOT_IN_THE_TEXT,
        groups={"kind": question.kind, "length": _length(text)},
        evidence=tuple(span for span in spans if span is not None),
    )


def _length(text: str) -> str:
    """Return the length in tokens, rounded to 1,000, 2,000, 4,000 or 8,000."""
    thousands = len(text) / CHARACTERS_PER_TOKEN / 1000
    return str(1000 * 2 ** min(3, max(0, round(log2(thousands)))))
