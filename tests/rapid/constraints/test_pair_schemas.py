"""JSON schemas of every kind, kept by the embedded pair in each mode."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

import rapid
from tests.rapid.constraints.json_schemas import NUM_SCHEMAS, make_schema
from tests.rapid.constraints.refusals import Refusals

MODES = ("plain", "lossless", "fused", "rag", "auto")
DOCUMENT = rapid.Document("isle", "The lighthouse of Varo was built by Rowe in 1871. " * 8)


@pytest.mark.slow
def test_the_embedded_pair_keeps_all_schemas_in_its_modes(monkeypatch: pytest.MonkeyPatch):
    refusals, finished = Refusals(monkeypatch), 0
    with rapid.open("embedded:target", drafter="embedded:drafter") as pair:
        for number in range(NUM_SCHEMAS):
            schema = make_schema(random.Random(number))
            answer = pair.answer(
                "Who built the lighthouse, and when?",
                documents=[DOCUMENT],
                structured_outputs={"json": schema},
                mode=MODES[number % len(MODES)],
                temperature=number // len(MODES) % 2,
                seed=number,
                max_tokens=120,
            )
            if answer.finish_reason == "stop":
                finished += 1
                jsonschema.validate(json.loads(answer.text), schema)
    # These small models write digits, and names in maps, without end now and then.
    assert finished > NUM_SCHEMAS / 2
    assert not refusals.count
