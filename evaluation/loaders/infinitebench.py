"""Loader of InfiniteBench (arXiv 2402.13718): questions on, and summaries of, long novels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from evaluation.items import Item
from evaluation.loaders.records import Record, read_records
from evaluation.tasks import Source
from rapid.chat_messages import Document, Message
from rapid.errors import ConfigurationError

LETTERS = "ABCD"
SUMMARY_REQUEST = "Summarize the book."


def load(source: Source, data: Path | None) -> Iterator[Item]:
    """Yield the items of a ``longbook_*_eng.jsonl``.

    With four options the answers are the right option's text and its letter, as in the official
    scorer. En.Sum has no question: retrieval then searches with the request itself.

    Raises:
        ConfigurationError: The answer of a record with options is not one of four options.
    """
    for record in read_records(source, data, ("id", "context", "input", "answer"), id_key="id"):
        question = record["input"].strip()
        options = record.get("options") or ()
        fields = {"question": question}
        fields |= {f"option_{a}": text for a, text in zip(LETTERS, options, strict=False)}
        asked = [question or SUMMARY_REQUEST]
        asked += [f"{a}. {text}" for a, text in zip(LETTERS, options, strict=False)]
        yield Item(
            id=str(record["id"]),
            messages=(Message("user", "\n".join(asked)),),
            document=Document("book", record["context"]),
            answers=_answers(record, options),
            query=question or SUMMARY_REQUEST,
            fields=fields,
        )


def _answers(record: Record, options: Sequence[str]) -> tuple[str, ...]:
    answer = record["answer"]
    answers = (answer,) if isinstance(answer, str) else tuple(answer)
    if not options:
        return answers
    if len(options) != len(LETTERS) or not answers or answers[0] not in options:
        raise ConfigurationError(
            f"item {record['id']}: the answer must be one of four options, not one of "
            f"{len(options)}: {answers}"
        )
    return answers[0], LETTERS[list(options).index(answers[0])]
