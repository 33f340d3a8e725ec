"""Loader of dialogues whose last turn follows a long history of other dialogues.

It follows RAPID (arXiv 2502.20330), section 4.4: the last turns of the first 100 dialogues of
MT-Bench-101 (arXiv 2402.14762), each after 500 others. A seed draws the 500; a dialogue's own
earlier turns come last.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from evaluation.items import Item
from evaluation.loaders.records import Record, read_records
from evaluation.tasks import Source
from rapid.chat_messages import Message
from rapid.config import Finite, Frozen
from rapid.errors import ConfigurationError


class DialogueOptions(Frozen):
    """The `options` of a source of dialogues.

    Attributes:
        queries: Number of dialogues, the first ones, whose last turn is to be answered.
        padding: Number of other dialogues from which histories are padded.
        history_tokens: Length of the padded history in tokens, counted at `characters_per_token`
            because items are made before there is a tokenizer.
        seed: Seed of the draw of the other dialogues and of each item's padding.
    """

    queries: int = Field(100, ge=1)
    padding: int = Field(500, ge=0)
    history_tokens: int = Field(122_000, ge=0)
    characters_per_token: Finite = Field(4.5, gt=0)
    seed: int = 0


def load(source: Source, data: Path | None) -> Iterator[Item]:
    """Yield the items of ``mtbench101.jsonl``.

    Its records have a task, an id and a history, which is a list of turns with user and bot. An
    item's `fields` hold the dialogue's own turns as text for the judge, and its `answers` the reply
    of the data set.

    Raises:
        ConfigurationError: The options or a record's history are not valid.
    """
    options = source.check_options(DialogueOptions, "dialogues")
    records = list(read_records(source, data, ("task", "id", "history"), id_key="id"))
    turns = [_turns(record) for record in records]
    pool = turns[options.queries :]
    random.Random(f"dialogues {options.seed}").shuffle(pool)
    pool = pool[: options.padding]
    for record, own in zip(records[: options.queries], turns, strict=False):
        name = f"{record['task']}-{record['id']}"
        characters = int(options.history_tokens * options.characters_per_token)
        padding = _padding(pool, characters - _size(own), f"{name} {options.seed}")
        yield Item(
            id=name,
            messages=(*padding, *own[:-1]),
            document=None,
            answers=(own[-1].text,),
            fields={"dialogue": "\n\n".join(f"{turn.role}: {turn.text}" for turn in own[:-1])},
            groups={"task": record["task"]},
        )


def _turns(record: Record) -> list[Message]:
    turns: list[Message] = []
    for turn in record["history"]:
        if not isinstance(turn, dict) or not {"user", "bot"} <= turn.keys():
            raise ConfigurationError(f"item {record['id']}: a turn of it lacks user or bot")
        turns += [Message("user", turn["user"]), Message("assistant", turn["bot"])]
    if not turns:
        raise ConfigurationError(f"item {record['id']}: its history is empty")
    return turns


def _padding(pool: Sequence[Sequence[Message]], characters: int, seed: str) -> list[Message]:
    """Return whole dialogues of `pool`, in an order drawn by `seed`, that fit `characters`."""
    padding: list[Message] = []
    for dialogue in random.Random(f"padding {seed}").sample(pool, len(pool)):
        size = _size(dialogue)
        if size <= characters:
            characters -= size
            padding += dialogue
    return padding


def _size(dialogue: Sequence[Message]) -> int:
    return sum(len(turn.text) for turn in dialogue)
