"""Answers that follow a grammar: valid in every mode, and exactly those of the masked target."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

import rapid
from rapid.checkpoints.files import load_tokenizer
from rapid.checkpoints.text import ChatText
from rapid.constraints import grammars as grammars_module
from rapid.constraints.grammars import Grammars, GrammarShaping, forbid
from rapid.constraints.schemas.closed_schemas import close_schema
from rapid.constraints.schemas.schema_checks import MAX_GRAMMAR
from rapid.constraints.shaping import LogitBias, Shapings, shape_rows
from rapid.constraints.structured_outputs import compile_regex, compile_schema
from rapid.engines.work.drafting import Drafting
from rapid.errors import BadRequest

SCHEMA = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "maxLength": 12},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2000},
        "kind": {"enum": ["ship", "town", "lighthouse"]},
    },
    "required": ["who", "year", "kind"],
    "additionalProperties": False,
}
TEXT = "The lighthouse of Varo guards the strait since 1871. It was built by Rowe. "
DOCUMENT = rapid.Document("isle", TEXT * 8)
QUESTION = "Who built the lighthouse?"


DRAFTERS = ["embedded:drafter", None, rapid.PromptLookup(), rapid.WindowDrafting(window=64)]


@pytest.fixture(scope="module", params=DRAFTERS, ids=str)
def pair(request: Any) -> Any:
    with rapid.open("embedded:target", drafter=request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def drafted() -> Any:
    with rapid.open("embedded:target", drafter="embedded:drafter") as opened:
        yield opened


def ask(pair: Any, **settings: Any) -> Any:
    form = {} if "response_format" in settings else {"structured_outputs": {"json": SCHEMA}}
    return pair.answer(QUESTION, documents=[DOCUMENT], max_tokens=90, **form | settings)


def is_valid(text: str) -> bool:
    told = json.loads(text)
    is_known = told["kind"] in ("ship", "town", "lighthouse") and 1000 <= told["year"] <= 2000
    return list(told) == ["who", "year", "kind"] and len(told["who"]) <= 12 and is_known


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["plain", "lossless", "fused", "rag", "auto"])
def test_every_finished_answer_is_valid(drafted: Any, mode: str, temperature: float):
    answer = ask(drafted, mode=mode, temperature=temperature, seed=7)
    assert answer.finish_reason == "stop"
    assert is_valid(answer.text)


def test_the_papers_rule_follows_it_as_well(drafted: Any):
    assert is_valid(ask(drafted, mode="paper", temperature=1.0, seed=7).text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whoever_drafts_a_seeded_answer_is_that_of_plain(pair: Any, temperature: float):
    plain = ask(pair, mode="plain", temperature=temperature, seed=5)
    assert is_valid(plain.text)
    assert ask(pair, mode="lossless", temperature=temperature, seed=5).text == plain.text


def test_the_drafter_proposes_only_what_is_allowed(drafted: Any):
    # Two whose distributions are one: all drafts are accepted, unless a mask is the target's alone.
    with rapid.open("embedded:target", drafter="embedded:target") as twins:
        statistics = ask(twins, mode="lossless", temperature=1.0).receipt.choices[0]
    assert statistics.drafted > 0
    assert statistics.corrected <= statistics.drafted / 4  # what else they read differs


def open_grammar(pattern: str) -> GrammarShaping:
    text = ChatText.load("embedded:target")
    grammars = Grammars(load_tokenizer("embedded:target"), text.eos_ids, 1024)
    return grammars.open(compile_regex(pattern))


def test_answers_of_one_grammar_have_states_of_their_own():
    text = ChatText.load("embedded:target")
    grammars = Grammars(load_tokenizer("embedded:target"), text.eos_ids, 1024)
    grammar = compile_regex("[ab]+")
    one, other = grammars.open(grammar), grammars.open(grammar)
    (a,) = text.encode("a")
    one.advance([a, *text.eos_ids])
    row = torch.zeros(1024)
    assert one.shape(row) is row  # behind the end
    one.roll_back(2)
    assert torch.equal(one.shape(row), other.shape(row))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["yes", 'no "way"', "perhaps\n"]}, 'yes|no "way"|perhaps\n'),
        ({"grammar": 'start: "a" B\nB: /[0-9]{2}/'}, "a[0-9]{2}"),
        ({"json_object": True}, r"\{.*"),
    ],
)
def test_each_form_of_vllm_is_followed(drafted: Any, form: dict[str, Any], pattern: str):
    answer = drafted.answer(QUESTION, structured_outputs=form, max_tokens=40, seed=2)
    assert re.fullmatch(pattern, answer.text, re.DOTALL)


@pytest.mark.parametrize(
    "schema", [SCHEMA, {"type": "array", "items": {"type": "null"}, "maxItems": 3}]
)
def test_openais_form_is_followed(drafted: Any, schema: Any):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    told = json.loads(ask(drafted, response_format=form, seed=3, temperature=0.0).text)
    assert isinstance(told, dict if schema is SCHEMA else list)
    plain = ask(drafted, response_format={"type": "text"}, seed=3)
    assert plain.text == drafted.answer(QUESTION, documents=[DOCUMENT], max_tokens=90, seed=3).text


@pytest.mark.parametrize(
    ("field", "form", "said"),
    [
        ("structured_outputs.regex", {"regex": "a("}, "unclosed group"),
        ("structured_outputs.regex", {"regex": "(?=a)b"}, "look-around"),
        ("structured_outputs.choice", {"choice": []}, "list of texts"),
        ("structured_outputs.grammar", {"grammar": "start: nothing"}, "unknown name"),
        ("structured_outputs.json", {"json": {"type": "strin"}}, "Invalid type: strin"),
        ("structured_outputs.json", {"json": 3}, "an object"),
        ("structured_outputs.json", {"json": {"$ref": "#/none"}}, "does not exist"),
        (
            "structured_outputs.json",
            {"json": {"properties": {"a": {"items": {"not": {}}}}}},
            r"'not', at \$\.properties\.a\.items",
        ),
        ("structured_outputs.json", {"json": {"enum": ["a" * MAX_GRAMMAR]}}, "too long"),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}, "must have one of"),
        ("structured_outputs", {}, "must have one of"),
        ("structured_outputs.lark", {"lark": "a"}, "not known"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(drafted: Any, field: str, form: Any, said: str):
    with pytest.raises(BadRequest, match=said) as refused:
        drafted.answer(QUESTION, structured_outputs=form)
    assert refused.value.param == field


def test_nested_without_end_is_refused():
    schema: dict[str, Any] = {}
    part = schema
    for _ in range(5000):
        part["items"] = part = {}
    with pytest.raises(ValueError, match="nested too deeply"):
        compile_schema(schema)


def test_forbidden_drafts_are_refused_by_the_row_before_them():
    text = ChatText.load("embedded:target")
    grammars = Grammars(load_tokenizer("embedded:target"), text.eos_ids, 1024)
    shaping = grammars.open(compile_regex("ab+"))
    (a,), (b,), (c,) = (text.encode(each) for each in "abc")
    logits = torch.zeros(4, 1030)  # with padding behind the vocabulary
    rows = shape_rows(shaping, logits, [a, c, b])
    assert rows[0].isfinite().nonzero().flatten().tolist()[0] == a
    assert not rows[1][c].isfinite()
    assert rows[1][b].isfinite()
    assert not rows[:2, 1024:].isfinite().any()
    assert torch.equal(rows[2:], logits[2:])  # never used
    assert torch.equal(shape_rows(shaping, logits, [a, c, b]), rows)  # the state stayed


def test_log_probabilities_are_of_what_may_be_said(drafted: Any):
    text = ChatText.load("embedded:target")
    (x, y) = (text.encode(each)[0] for each in "xy")
    shaping = Grammars(load_tokenizer("embedded:target"), text.eos_ids, 1024).open(
        compile_regex("x|y")
    )
    row = shaping.shape(torch.zeros(1024))
    assert set(row.isfinite().nonzero().flatten().tolist()) == {x, y}


@pytest.mark.parametrize("mode", ["lossless", "fused"])
def test_a_token_that_must_come_is_drafted_without_a_forward(
    drafted: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The text is the same, and the drafter computes as many rows fewer as tokens were forced."""
    asked: list[object] = []
    ask_after = Drafting.ask_after
    monkeypatch.setattr(
        Drafting, "ask_after", lambda *given: asked.append(given) or ask_after(*given)
    )
    settings = {"mode": mode, "seed": 5, "temperature": 1.0, "coupling": "maximal"}
    told = ask(drafted, **settings)
    (counts,), num_asked = told.receipt.choices, len(asked)
    monkeypatch.setattr(GrammarShaping, "find_forced", lambda _: None)
    asked.clear()
    unforced = ask(drafted, **settings)
    assert told.text == unforced.text
    assert unforced.receipt.choices[0].forced == 0
    assert counts.forced >= counts.completion_tokens / 5
    assert num_asked <= len(asked) - counts.forced / 2  # what is drafted ahead is not counted
    assert counts.drafted >= counts.accepted >= counts.forced / 2


@pytest.mark.parametrize("drafter", DRAFTERS[2:], ids=str)
def test_what_must_come_needs_no_window_and_no_copy(
    drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rapid.open("embedded:target", drafter=drafter) as pair:
        # Under maximal coupling a seed fixes the lengths of blocks, which follow no measured times.
        settings = {"mode": "lossless", "seed": 5, "temperature": 1.0, "coupling": "maximal"}
        told = ask(pair, **settings)
        monkeypatch.setattr(GrammarShaping, "find_forced", lambda _: None)
        unforced = ask(pair, **settings)
    (counts,) = told.receipt.choices
    assert told.text == unforced.text
    assert unforced.receipt.choices[0].forced == 0
    assert counts.forced > 0
    assert counts.drafted >= counts.accepted > 0


def test_a_copied_block_ends_where_the_grammar_goes_another_way():
    text = ChatText.load("embedded:target")
    shaping = open_grammar("(ab|c)(xyz|w)")
    a, b, c, x, z, w = (text.encode(each)[0] for each in "abcxzw")
    (eos,) = text.eos_ids
    assert shaping.count_allowed([a, b, x, w, z]) == 3
    assert shaping.count_allowed([c, w, eos]) == 3
    assert shaping.count_allowed([c, eos, w]) == 1
    (quote,) = text.encode('"')
    spelt = open_grammar('a":b')  # of which two marks are one token
    assert spelt.count_allowed([a, quote]) == 1
    spelt.advance([a])
    assert spelt.find_forced() not in (quote, None)
    shaping.advance([a])
    assert shaping.find_forced() == b
    assert shaping.count_allowed([c]) == 0
    both = Shapings([LogitBias(((1, 1.0),)), shaping])
    assert both.count_allowed([b, w, a]) == 2


def test_masks_are_those_of_the_text_however_it_was_come_by():
    """Tokens come, go and come back, with masks prepared or not; a new matcher always agrees."""
    rng = random.Random(0)
    text = ChatText.load("embedded:target")
    words = [text.encode(each)[0] for each in "abcdx"] + [*text.eos_ids]
    grammars = Grammars(load_tokenizer("embedded:target"), text.eos_ids, 1024)
    grammar = compile_regex("(ab|ac|ad){1,3}x?|aa[a-d]*")
    shaping, told = grammars.open(grammar), []
    for _ in range(400):
        drafted = [rng.choice(words) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.5:
            shaping.prepare(drafted, rng.randint(1, len(drafted) + 1))
        if told and rng.random() < 0.5:
            gone = rng.randint(1, len(told))
            shaping.roll_back(gone)
            del told[len(told) - gone :]
        elif len(told) < 8:
            shaping.advance(drafted)
            told += drafted
        fresh = grammars.open(grammar)
        fresh.advance(told)
        assert torch.equal(shaping.shape(torch.zeros(1024)), fresh.shape(torch.zeros(1024)))
        assert shaping.find_forced() == fresh.find_forced()


def test_as_many_masks_are_kept_as_are_rolled_back(monkeypatch: pytest.MonkeyPatch):
    """A drafter asks for masks ahead, and goes on from where its block was cut."""
    monkeypatch.setattr(grammars_module, "_MOST_MASKS", 8)
    rng, text = random.Random(1), ChatText.load("embedded:target")
    shaping, (a,) = open_grammar("a*"), text.encode("a")
    for _ in range(60):
        for ahead in range(8):
            shaping.advance([a] * ahead)
            shaping.shape(torch.zeros(1024))
            shaping.roll_back(ahead)
        shaping.advance([a] * rng.randint(1, 8))
        assert len(shaping._masks) <= 16  # those behind the place, and those before it


def test_masks_are_made_while_the_forward_runs(drafted: Any, monkeypatch: pytest.MonkeyPatch):
    """All but the first, at the door, are what another thread is asked for; here it has time."""
    places: list[str] = []
    place = "here"
    find = grammars_module.find_allowed

    class Beside:
        def submit(self, call: Any, *given: Any) -> Future[None]:
            nonlocal place
            place, done = "beside", Future[None]()
            done.set_result(call(*given))
            place = "here"
            return done

    monkeypatch.setattr(grammars_module, "find_allowed", lambda m: places.append(place) or find(m))
    monkeypatch.setattr(grammars_module, "_open_threads", Beside)
    ask(drafted, mode="plain", seed=1)
    assert places.count("here") <= 1
    assert places.count("beside") > 10


def test_masks_that_were_not_begun_are_made_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
):
    class Busy:
        def submit(self, *_: Any) -> Future[None]:
            return Future()

    shaping, other = open_grammar("ab+"), open_grammar("ab+")
    monkeypatch.setattr(grammars_module, "_open_threads", Busy)
    shaping.prepare([], 1)
    assert torch.equal(shaping.shape(torch.zeros(1024)), other.shape(torch.zeros(1024)))


@pytest.mark.parametrize("num_rows", [40, 64, 70])
def test_forbidden_tokens_and_padding_are_impossible(num_rows: int):
    allowed = np.packbits(np.arange(64) % 3 == 0, bitorder="little")
    row = forbid(torch.arange(float(num_rows)), allowed)
    assert row.isfinite().nonzero().flatten().tolist() == list(range(0, min(num_rows, 64), 3))
    assert row[3] == 3


class TestClosing:
    def test_objects_have_no_properties_but_those_that_a_schema_names(self):
        inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
        schema = {
            "properties": {"list": {"type": "array", "items": inner}, "one": {"$ref": "#/$defs/x"}},
            "$defs": {"x": inner, "open": inner | {"additionalProperties": True}},
        }
        closed = close_schema(schema)
        none = {"additionalProperties": False}
        assert closed == schema | none | {
            "properties": schema["properties"] | {"list": {"type": "array", "items": inner | none}},
            "$defs": {"x": inner | none, "open": inner | {"additionalProperties": True}},
        }
        assert schema["$defs"]["x"] == inner  # what was given is as it was

    def test_parts_of_one_object_get_the_names_of_the_others(self):
        one, other = {"a": {"type": "null"}}, {"b": {"type": "integer"}}
        none = {"additionalProperties": False}
        assert close_schema({"allOf": [{"properties": one}, {"properties": other}]}) == {
            "allOf": [
                {"properties": one | {"b": {}}} | none,
                {"properties": other | {"a": {}}} | none,
            ]
        }

    def test_values_stay_as_they_are(self):
        for schema in ({"enum": [{"properties": {"a": 1}}]}, True, {"type": "object"}):
            assert close_schema(schema) == schema
