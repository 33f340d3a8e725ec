"""JSON schemas of every kind, each kept by the embedded pair in every mode."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

import rapid
from rapid.answering.request import RequestRun
from rapid.events import TextDelta
from rapid.pair.asking import as_request
from rapid.pair.pair import Pair
from tests.rapid.constraints.json_schemas import NUM_SCHEMAS, make_schema
from tests.rapid.constraints.refusals import Refusals

MODES = ("plain", "lossless", "fused", "rag", "auto")
DOCUMENT = rapid.Document("isle", "The lighthouse of Varo was built by Rowe in 1871. " * 8)
QUESTION = "Who built the lighthouse, and when?"
NUM_TOGETHER = 12  # schemas whose answers in all modes share the engines' steps
LONG, SHORT = 120, 28  # tokens: every other schema is asked for a long answer in one of the modes


def ask_in_all_modes(pair: Pair, numbers: Sequence[int]) -> list[tuple[Any, str | None]]:
    """Return each schema with its answer in each mode; None for one that was cut."""

    async def ask(number: int, mode: str) -> tuple[Any, str | None]:
        schema = make_schema(random.Random(number))
        settings: dict[str, Any] = {
            "structured_outputs": {"json": schema},
            "mode": mode,
            "temperature": number // len(MODES) % 2,
            "seed": number,
            "max_tokens": LONG if number % 2 and mode == MODES[number % len(MODES)] else SHORT,
        }
        request = as_request(f"{number} {mode}", QUESTION, [DOCUMENT], settings, is_streamed=False)
        events = [each async for each in RequestRun(pair._services, request).events()]
        deltas = [each for each in events if isinstance(each, TextDelta)]
        is_whole = deltas[-1].finish_reason == "stop"
        return schema, "".join(each.text for each in deltas) if is_whole else None

    async def ask_all() -> list[tuple[Any, str | None]]:
        return await asyncio.gather(*(ask(number, mode) for number in numbers for mode in MODES))

    return pair._loop.run(ask_all)


@pytest.mark.slow
def test_the_embedded_pair_keeps_all_schemas_in_all_modes(monkeypatch: pytest.MonkeyPatch):
    refusals, finished = Refusals(monkeypatch), 0
    with rapid.open("embedded:target", drafter="embedded:drafter") as pair:
        for first in range(0, NUM_SCHEMAS, NUM_TOGETHER):
            numbers = range(first, min(first + NUM_TOGETHER, NUM_SCHEMAS))
            for schema, answer in ask_in_all_modes(pair, numbers):
                if answer is not None:
                    finished += 1
                    jsonschema.validate(json.loads(answer), schema)
    # These small models write digits, and names in maps, without end now and then.
    assert finished > NUM_SCHEMAS * len(MODES) * 0.4
    assert not refusals.count
