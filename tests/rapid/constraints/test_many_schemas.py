"""Generated JSON schemas: every finished answer is valid, and no draft is refused by a grammar.

Tiny models with random weights say anything that a grammar lets them; each kind of drafting has a
third of the schemas. The embedded pair, which would rather say something else, has each schema in
every mode (`test_pair_schemas.py`).
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rapid
from rapid.checkpoints.files import checkpoint_source
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.constraints.schemas.schema_checks import UnusableGrammar
from rapid.constraints.structured_outputs import compile_schema
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from tests.rapid.constraints.json_schemas import NUM_SCHEMAS, make_schema, make_unusable
from tests.rapid.constraints.refusals import Refusals

DRAFTINGS = ("plain", "lossless", "fused", "lookup", "window", "boost")
HALF = len(DRAFTINGS) // 2
LONG = '{"p0": "ship", "p1": [7, null], "value": 4, "next": {"value": true}} ' * 2
NUM_QUICK = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedModel]:
    """Target and drafter with the embedded models' tokenizer, and weights of their own."""
    torch.set_num_threads(1)
    embedded, models = Path(checkpoint_source("embedded:target")), []
    for seed in range(2):
        folder = tmp_path_factory.mktemp("tiny")
        shutil.copytree(embedded, folder, dirs_exist_ok=True)
        torch.manual_seed(seed)
        eos = json.loads((embedded / "config.json").read_text())["eos_token_id"]
        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            eos_token_id=eos,
            initializer_range=0.3,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        models.append(load_model(EngineConfig(model=str(folder), threads=1, page_tokens=16)))
    return models


def ask(tiny: list[LoadedModel], drafting: str, schema: Any, number: int) -> Any:
    target, drafter = tiny
    drafters = {
        "plain": None,
        "lookup": rapid.PromptLookup(),
        "window": rapid.WindowDrafting(window=16),
    }
    settings: dict[str, Any] = {"eta": 0.0} if drafting not in ("fused", "boost", "paper") else {}
    if drafting == "boost":
        settings = {"transfer": "boost"}
    if drafting == "paper":
        settings = {"rule": "paper"}
    text = ChatText.load("embedded:target")
    is_sampled = drafting == "paper" or number % 5
    return rapid.generate(
        target,
        drafters.get(drafting, drafter),
        text.encode(LONG),
        text.encode(LONG[:40]) if drafting not in drafters else (),
        max_tokens=60,
        sampling=SamplingConfig(
            temperature=1.0 if is_sampled else 0.0, seed=number, grammar=compile_schema(schema)
        ),
        speculation=SpeculationConfig(max_draft=4, **settings),
    )


def check_all(tiny: list[LoadedModel], numbers: range, refusals: Refusals) -> None:
    text = ChatText.load("embedded:target")
    (eos,) = text.eos_ids
    num_asked = num_finished = num_forced = 0
    for number in numbers:
        schema = make_schema(random.Random(number))
        kinds = [DRAFTINGS[(number + each) % len(DRAFTINGS)] for each in (0, HALF)]
        for drafting in (*kinds, *["paper"] * (number % 5 == 0)):
            told = ask(tiny, drafting, schema, number)
            num_asked += 1
            if told.token_ids[-1] == eos:
                num_finished += 1
                # Formats are checked by the grammar alone: jsonschema asks for more packages.
                jsonschema.validate(json.loads(text.decode(told.token_ids[:-1])), schema)
            num_forced += told.statistics.forced
    assert num_finished > 0.6 * num_asked  # digits without end come now and then
    assert num_forced > num_asked
    assert not refusals.count


def test_some_schemas_are_kept_by_every_kind_of_drafting(
    tiny: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
):
    check_all(tiny, range(NUM_QUICK), Refusals(monkeypatch))


@pytest.mark.slow
def test_all_schemas_are_kept_by_every_kind_of_drafting(
    tiny: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
):
    check_all(tiny, range(NUM_QUICK, NUM_SCHEMAS), Refusals(monkeypatch))


def test_what_cannot_be_enforced_is_refused_by_path_and_keyword():
    for number in range(60):
        schema, keyword, path = make_unusable(random.Random(number))
        with pytest.raises(UnusableGrammar) as refused:
            compile_schema(schema)
        assert keyword in str(refused.value)
        assert path in str(refused.value)
