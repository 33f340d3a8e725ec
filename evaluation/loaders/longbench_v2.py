"""Loader of LongBench v2 (arXiv 2412.15204): 503 four-choice questions over 8K to 2M words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from evaluation.items import Item
from evaluation.loaders.records import read_records
from evaluation.tasks import Source
from rapid.chat_messages import Document, Message
from rapid.config import Frozen

GROUPS = ("difficulty", "length", "domain", "sub_domain")
CHOICES = ("choice_A", "choice_B", "choice_C", "choice_D")


class LongBenchOptions(Frozen):
    """The `options` of a source of LongBench v2.

    Attributes:
        length: The one length of which items are kept, as in RAPID's Table 3; None keeps all.
    """

    length: Literal["short", "medium", "long"] | None = None


def load(source: Source, data: Path | None) -> Iterator[Item]:
    """Yield the items of ``data.json``.

    Texts are stripped. Retrieval searches with the question and its choices up to the first blank
    line, as ``eval/pred_longbench.py`` of RAPID's code does: it takes what follows ``</text>`` in
    the prompt, where no blank line stands between question and choices.

    Raises:
        ConfigurationError: The options are not valid.
    """
    length = source.check_options(LongBenchOptions, "LongBench v2").length
    keys = ("_id", *GROUPS, "question", *CHOICES, "answer", "context")
    for record in read_records(source, data, keys, id_key="_id"):
        if length not in (None, record["length"]):
            continue
        fields = {key: record[key].strip() for key in ("question", *CHOICES)}
        choices = "\n".join(f"({key[-1]}) {fields[key]}" for key in CHOICES)
        yield Item(
            id=record["_id"],
            messages=(Message("user", f"{fields['question']}\n{choices}"),),
            document=Document("text", record["context"].strip()),
            answers=(record["answer"],),
            query=_query(fields["question"], choices),
            fields=fields,
            groups={key: record[key] for key in GROUPS},
        )


def _query(question: str, choices: str) -> str:
    """Return what RAPID's code searches with; a question of several paragraphs loses the rest."""
    return f"{question}\nChoices:\n{choices}".split("\n\n")[0]
