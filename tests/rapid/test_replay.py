"""Answers of the embedded pair, recomputed from their receipts by the specification."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rapid
from deployments.api.dialects.chat.wire import rapid_receipt
from rapid.answering.request import RequestRun
from rapid.embedded.example import Example
from rapid.embedded.generator import generate_document
from rapid.pair.asking import as_request
from rapid.pair.pair import Pair
from rapid.pair.pair_stream import Stream
from rapid.replay import CannotReplay, Mismatch, ReplayModels, find_mismatch, read_receipt
from rapid.requests.sampling_fields import SamplingFields
from rapid.transfers import OWN_RULES
from tests.deployments.cli.command import rapid as command

DOCUMENT = generate_document(7, 1500)
MODELS = {"target": "embedded:target", "drafter": "embedded:drafter"}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with rapid.open("embedded:target", drafter="embedded:drafter") as opened:
        yield opened


@pytest.fixture(scope="module")
def models() -> ReplayModels:
    return ReplayModels(MODELS["target"], MODELS["drafter"])


def ask(pair: Pair, num_choices: int = 1, **settings: object) -> Json:
    """Return the file of an answer of 16 tokens at most, as ``rapid ask --receipt`` writes it."""
    settings = {"temperature": 0.8, "max_tokens": 16} | settings
    question = DOCUMENT.questions[0].question
    request = as_request("a", question, [DOCUMENT.text], settings, is_streamed=False)
    run = RequestRun(pair._services, replace(request, explain=True, num_choices=num_choices))
    stream = Stream(pair._loop, run.events())
    assert "".join(stream)
    assert stream.answer is not None
    names = SamplingFields.model_fields.keys() | {"temperature"}
    asked = {name: value for name, value in settings.items() if name in names - {"seed"}}
    receipt = rapid_receipt(stream.answer.receipt)
    return json.loads(json.dumps({"request": asked, "receipt": receipt, "models": MODELS}))


def tokens_of(file: Json) -> list[int]:
    tokens: list[int] = file["receipt"]["explain"]["token_ids"][0]
    return tokens


def replay(file: Json, models: ReplayModels) -> Mismatch | None:
    return find_mismatch(read_receipt(json.dumps(file)), models)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "plain", "seed": 7},
        {"mode": "plain", "seed": 7, "top_p": 0.7, "top_k": 5},
        {"mode": "plain", "seed": 7, "min_p": 0.3},
        {"mode": "fused", "seed": 7, "temperature": 2.0, "min_p": 0.3},
        {"mode": "plain", "temperature": 0.0},
        {"mode": "lossless", "seed": 7},
        {"mode": "lossless", "seed": 7, "coupling": "maximal"},
        {"mode": "lossless"},
        {"mode": "lossless", "temperature": 0.0},
        {"mode": "fused", "seed": 7},
        {"mode": "fused", "seed": 7, "temperature": 2.0, "transfer": "boost", "eta": 3.0},
        {"mode": "fused", "temperature": 2.0},
        {"mode": "fused", "temperature": 1.5, "eta": 1.0, "seed": 2},  # by the log odds
        {"mode": "fused", "temperature": 0.0},
        {"mode": "paper", "seed": 7, "temperature": 2.0},
        {"mode": "rag", "seed": 7},
        {"mode": "auto", "seed": 7},
    ],
    ids=str,
)
def test_the_contract_explains_every_token_of_an_answer(pair, models, settings):
    assert replay(ask(pair, **settings), models) is None


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("mode", ["plain", "lossless", "fused", "paper", "rag"])
def test_a_bias_of_logits_is_part_of_the_contract(pair, models, mode, temperature):
    settings = {"mode": mode, "temperature": temperature or (1.0 if mode == "paper" else 0.0)}
    usual = ask(pair, seed=7, **settings)
    (token_ids,) = usual["receipt"]["explain"]["token_ids"]
    bias = {token_ids[0]: -100, token_ids[1]: -2.5, 100: 2, 101: 3.5}
    biased = ask(pair, seed=7, logit_bias=bias, **settings)
    assert token_ids[0] not in biased["receipt"]["explain"]["token_ids"][0]
    assert replay(biased, models) is None
    del biased["request"]["logit_bias"]
    mismatch = replay(biased, models)
    assert mismatch is not None
    assert mismatch.position == 0


SCHEMA = {
    "type": "object",
    "properties": {"harbor": {"type": "string", "maxLength": 8}, "in": {"enum": ["May", "June"]}},
    "required": ["harbor", "in"],
}


@pytest.mark.parametrize("mode", ["plain", "lossless", "fused", "paper", "rag"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structured_outputs", {"json": SCHEMA}),
        ("structured_outputs", {"choice": ["dolu maki 48", "dolu maki 84"]}),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 1.5),
        ("frequency_penalty", -1.0),
        ("repetition_penalty", 1.3),
        ("min_tokens", 14),
        ("bad_words", ["of", "harbor"]),
        ("allowed_token_ids", [*range(60, 160)]),
        ("ignore_eos", True),
        ("stop_token_ids", [30]),
    ],
)
def test_what_shapes_logits_is_part_of_the_contract(pair, models, mode, name, value):
    settings = {"mode": mode, "seed": 7, "temperature": 1.0, "penalize_documents": True}
    file = ask(pair, **settings, **{name: value})
    assert replay(file, models) is None
    usual = ask(pair, **settings)
    del file["request"][name]
    is_usual = tokens_of(file) == tokens_of(usual)[: len(tokens_of(file))]
    assert (replay(file, models) is None) == is_usual


def test_a_token_that_the_grammar_forbids_is_named(pair, models):
    file = ask(pair, mode="fused", seed=7, structured_outputs={"json": SCHEMA})
    (token_ids,) = file["receipt"]["explain"]["token_ids"]
    was, token_ids[0] = token_ids[0], token_ids[0] + 1
    assert replay(file, models) == Mismatch(0, 0, was + 1, was)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "look"}}]),
        ("guided_regex", "a+"),
        ("thinking_token_budget", 0),
        ("chat_template_kwargs", {"enable_thinking": True}),
    ],
)
def test_what_shapes_logits_in_ways_that_a_receipt_does_not_tell_is_not_replayed(
    pair, models, name, value
):
    file = ask(pair, mode="plain", seed=7)
    file["request"][name] = value
    with pytest.raises(CannotReplay, match=f"the answer follows {name}"):
        replay(file, models)


def test_a_grammar_behind_thinking_is_not_replayed(pair, models):
    file = ask(pair, mode="plain", seed=7, structured_outputs={"json": SCHEMA})
    file["receipt"]["explain"]["tokens"][0][2]["is_thinking"] = True
    with pytest.raises(CannotReplay, match="thought before it answered"):
        replay(file, models)


def test_a_request_that_contradicts_itself_is_not_replayed(pair, models):
    file = ask(pair, mode="plain", seed=7, structured_outputs={"json": SCHEMA})
    file["request"]["min_tokens"] = 3
    with pytest.raises(CannotReplay, match="min_tokens contradicts a grammar"):
        replay(file, models)


@pytest.mark.parametrize("mode", ["plain", "fused", "rag"])
def test_a_token_that_was_changed_is_named(pair, models, mode):
    file = ask(pair, mode=mode, seed=7)
    (token_ids,) = file["receipt"]["explain"]["token_ids"]
    was = token_ids[3]
    token_ids[3] = was + 1
    assert replay(file, models) == Mismatch(0, 3, was + 1, was)


def test_every_choice_is_recomputed_with_its_own_noise(pair, models):
    file = ask(pair, num_choices=2, mode="plain", seed=7, temperature=2.0)
    explain = file["receipt"]["explain"]
    first, second = explain["token_ids"]
    assert first != second
    assert replay(file, models) is None
    explain["token_ids"], explain["origins"] = [first, first], [explain["origins"][0]] * 2
    found = replay(file, models)
    assert found is not None
    assert (found.choice, found.expected_id) == (1, second[found.position])


def test_a_rule_that_a_program_registered_is_not_replayed(pair, models):
    rapid.register_transfer("mine", lambda p, q, eta: p + q)
    try:
        file = ask(pair, mode="fused", seed=7, transfer="mine")
        with pytest.raises(CannotReplay, match="'mine', a transfer rule that a program"):
            replay(file, models)
        assert replay(ask(pair, mode="plain", seed=7, transfer="mine"), models) is None
    finally:
        OWN_RULES.clear()


def test_another_seed_does_not_explain_the_answer(pair, models):
    file = ask(pair, mode="plain", seed=7, temperature=2.0)
    file["receipt"]["seed"] = 8
    assert replay(file, models) is not None


def test_a_contract_that_was_changed_does_not_explain_the_answer(pair, models):
    fused, plain = (
        ask(pair, mode=mode, seed=7, temperature=2.0)["receipt"]["explain"]["token_ids"][0]
        for mode in ("fused", "plain")
    )
    differs = next(i for i, (x, y) in enumerate(zip(fused, plain, strict=False)) if x != y)
    file = ask(pair, mode="fused", seed=7, temperature=2.0)
    file["receipt"]["contract"] = "target"
    assert replay(file, models) == Mismatch(0, differs, fused[differs], plain[differs])


def test_from_where_the_drafter_was_lost_the_target_s_own_tokens_are_right(pair, models):
    file = ask(pair, mode="fused", seed=7, temperature=2.0)
    plain = ask(pair, mode="plain", seed=7, temperature=2.0)
    alone = plain["receipt"]["explain"]["token_ids"]
    assert file["receipt"]["explain"]["token_ids"] != alone
    explain = file["receipt"]["explain"]
    explain["token_ids"], explain["origins"] = alone, plain["receipt"]["explain"]["origins"]
    assert replay(file, models) is not None
    file["receipt"]["plain_from"] = [0]
    assert replay(file, models) is None


@pytest.fixture(scope="module")
def good(pair: Pair) -> Json:
    return ask(pair, mode="fused", seed=7)


def write(folder: Path, content: object) -> str:
    path = folder / "receipt.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_the_command_says_that_all_is_explained(good, tmp_path):
    done = command("replay", write(tmp_path, good))
    count = len(good["receipt"]["explain"]["token_ids"][0])
    told = f"all {count} tokens are explained by the contract 'fused' (seed 7)\n"
    assert (done.stdout, done.exit_code) == (told, 0)


def test_the_command_names_the_token_that_is_not(good, tmp_path):
    file = copy.deepcopy(good)
    (token_ids,) = file["receipt"]["explain"]["token_ids"]
    was, token_ids[2] = token_ids[2], token_ids[2] + 1
    wrong, right = (repr(Example().decode([each])) for each in (was + 1, was))
    done = command("replay", write(tmp_path, file))
    told = f"token 2 ({wrong}) is not explained: the contract 'fused' gives {right} there\n"
    assert (done.stdout, done.exit_code) == (told, 1)


def test_what_cannot_be_replayed_is_told_in_a_sentence(good, tmp_path):
    def told(**changes: object) -> str:
        done = command("replay", write(tmp_path, good | changes))
        assert (done.exit_code, done.stdout) == (2, "")
        return done.stderr

    def with_receipt(**changes: object) -> str:
        return told(receipt=good["receipt"] | changes)

    explain = good["receipt"]["explain"]
    assert "no receipt that" in told(receipt={})
    assert "request.temperature" in told(request={})
    assert "give it with --target" in told(models={})
    assert "embedded models are" in told(models={"target": "embedded:other"})
    assert "cannot be loaded" in told(models={"target": str(tmp_path)})
    assert "explain 'tokens'" in with_receipt(explain=None)
    assert "cannot be replayed" in with_receipt(refreshes=1)
    assert "one origin for each" in with_receipt(explain=explain | {"origins": [[]]})
    assert "no prompt of the drafter" in with_receipt(explain=explain | {"drafter_prompt_ids": []})
    other = explain | {"target_prompt_ids": [10**6]}
    assert "not the model that was asked" in with_receipt(explain=other)
    looked_up = explain | {"drafter_prompt_ids": []}
    told_of_lookup = with_receipt(contract="target", coupling="maximal", explain=looked_up)
    assert "prompt lookup" in told_of_lookup


def test_a_file_that_is_no_json_or_is_missing_is_told(tmp_path):
    path = tmp_path / "receipt.json"
    assert "cannot be read" in command("replay", str(path)).stderr
    path.write_bytes(b"\xff{")
    done = command("replay", str(path))
    assert (done.exit_code, "no receipt" in done.stderr) == (2, True)


def test_another_target_does_not_explain_the_answer(pair, models):
    file = ask(pair, mode="plain", seed=7, temperature=2.0)
    assert replay(file, models) is None
    assert replay(file, ReplayModels(MODELS["drafter"], None)) is not None


def test_a_receipt_needs_a_prompt(good):
    file = copy.deepcopy(good)
    file["receipt"]["explain"]["target_prompt_ids"] = []
    with pytest.raises(CannotReplay, match="no prompt of the target"):
        replay(file, ReplayModels(MODELS["target"], MODELS["drafter"]))
