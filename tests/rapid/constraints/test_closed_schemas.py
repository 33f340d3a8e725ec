"""Closing a JSON schema forbids properties that it does not name, and none that it does."""

from __future__ import annotations

import collections
import contextlib
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from rapid.constraints.schemas import closed_schemas
from rapid.constraints.schemas.closed_schemas import close_schema
from rapid.constraints.schemas.plain_schemas import simplify_schema
from rapid.constraints.schemas.schema_checks import UnusableGrammar, prepare_schema
from rapid.constraints.structured_outputs import compile_schema

BYTES = LLTokenizer("byte")
BASE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OWN = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
FREE = {"type": "object", "properties": {"b": {"type": "string"}}}
DEFS = {"$defs": {"Base": BASE, "Own": OWN}}
TO_BASE = {"$ref": "#/$defs/Base"}


def by_kind(kind: str, **more: Any) -> dict[str, Any]:
    return {"properties": {"k": {"const": kind}} | more, "required": ["k"]}


def accepts(schema: Any, instance: Any) -> bool:
    matcher = LLMatcher(BYTES, compile_schema(schema))
    text = json.dumps(instance, separators=(",", ":")).encode()
    return matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "instance"),
    [
        # As OpenAPI's generators write a class that inherits.
        ({"allOf": [TO_BASE, OWN]} | DEFS, {"a": 1, "b": "x"}),
        ({"allOf": [TO_BASE, FREE]} | DEFS, {"a": 1, "b": "x"}),
        ({"allOf": [TO_BASE, {"$ref": "#/$defs/Own"}]} | DEFS, {"a": 1, "b": "x"}),
        (TO_BASE | {"properties": FREE["properties"]} | DEFS, {"a": 1, "b": "x"}),
        (BASE | {"anyOf": [FREE, {"properties": {"c": {"type": "integer"}}}]}, {"a": 1, "b": "x"}),
        (
            BASE | {"oneOf": [by_kind("x", p={"type": "integer"}), by_kind("y")]},
            {"a": 1, "k": "x", "p": 2},
        ),
        (BASE | {"required": ["a", "b"]}, {"a": 1, "b": "x"}),
        (TO_BASE | {"required": ["b"]} | DEFS, {"a": 1, "b": "x"}),
        ({"allOf": [TO_BASE, {"required": ["b"]}]} | DEFS, {"a": 1, "b": "x"}),
        (BASE | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1, "b": "x"}),
        (
            {"allOf": [TO_BASE, {"patternProperties": {"^b": {"type": "string"}}}]} | DEFS,
            {"a": 1, "b": "x"},
        ),
        # What is one property of both, or an item of both, has the parts of both.
        (
            {"allOf": [{"properties": {"in": BASE}}, {"properties": {"in": FREE}}]},
            {"in": {"a": 1, "b": "x"}},
        ),
        (
            {"allOf": [{"properties": {"in": TO_BASE}}, {"properties": {"in": FREE}}]} | DEFS,
            {"in": {"a": 1, "b": "x"}},
        ),
        (
            {"allOf": [{"items": BASE, "minItems": 1}, {"items": OWN}], "type": "array"},
            [{"a": 1, "b": "x"}],
        ),
        (
            {
                "allOf": [
                    {"properties": {"in": {"type": "array", "items": BASE}}},
                    {"properties": {"in": {"type": "array", "items": FREE}}},
                ]
            },
            {"in": [{"a": 1, "b": "x"}]},
        ),
        (
            {"allOf": [{"properties": {"in": BASE}}, {"additionalProperties": FREE}]},
            {"in": {"a": 1, "b": "x"}},
        ),
    ],
)
def test_an_object_that_is_told_in_parts_has_the_names_of_all(schema: Any, instance: Any):
    assert accepts(schema, instance)
    if isinstance(instance, dict) and "patternProperties" not in json.dumps(schema):
        assert not accepts(schema, instance | {"z": 1})


def test_an_alternative_has_no_names_of_the_others():
    more = {"properties": {"b": {"type": "string"}}}
    schema = BASE | {"anyOf": [more, {"properties": {"c": {"type": "integer"}}}]}
    assert accepts(schema, {"a": 1, "b": "x"})
    assert accepts(schema, {"a": 1, "c": 1})
    assert not accepts(schema, {"a": 1, "b": "x", "c": 1})
    assert not accepts(schema, {"a": 1, "b": 1})


def test_of_very_many_names_no_part_gets_those_of_all_others():
    parts = [{"properties": {f"p{each}": {"type": "integer"}}} for each in range(100)]
    assert accepts({"allOf": parts}, {"p7": 1, "p50": 2, "more": 3})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [{"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}]},
    ],
)
def test_what_has_no_end_is_refused(schema: Any):
    with pytest.raises(UnusableGrammar, match="allows no value that ends"):
        compile_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["a"],
        },
    ],
)
def test_what_may_end_is_not(schema: Any):
    assert compile_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        BASE,
        TO_BASE | DEFS,
        # As pydantic writes a field that is a model and has a description or a default.
        {"allOf": [TO_BASE], "description": "The base.", "default": {"a": 1}} | DEFS,
        {"anyOf": [TO_BASE, {"type": "null"}]} | DEFS,
        BASE | {"anyOf": [{"required": ["a"]}, {"properties": {"a": {"minimum": 0}}}]},
        {"allOf": [{"required": ["a"]}], **BASE},
    ],
)
def test_an_object_that_is_told_at_once_is_closed(schema: Any):
    assert accepts(schema, {"a": 1})
    assert not accepts(schema, {"a": 1, "z": 1})


def test_what_is_beside_an_object_in_parts_stays_closed():
    address = {"type": "object", "properties": {"street": {"type": "string"}}}
    schema = {"allOf": [TO_BASE, {"properties": {"home": address}}]} | DEFS
    assert accepts(schema, {"a": 1, "home": {"street": "x"}})
    assert not accepts(schema, {"a": 1, "home": {"street": "x", "z": 1}})


def test_a_circle_of_references_is_closed():
    node = {"properties": {"next": {"$ref": "#/$defs/Node"}, "a": {"type": "integer"}}}
    schema = {"$ref": "#/$defs/Node", "$defs": {"Node": node}}
    assert accepts(schema, {"next": {"a": 1}})
    assert not accepts(schema, {"next": {"z": 1}})
    assert close_schema({"$ref": "#"}) == {"$ref": "#"}


def test_what_enforces_nothing_is_left_out():
    names = {"title": {"type": "string", "description": "A word."}, "default": {"type": "null"}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Work",
        "type": "object",
        "properties": names | {"const": {"const": {"title": 1}}},
        "propertyNames": {"type": "string", "description": "A name."},
    }
    assert close_schema(simplify_schema(schema)) == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "default": {"type": "null"},
            "const": {"const": {"title": 1}},
        },
        "additionalProperties": False,
    }


@pytest.mark.parametrize("named", ["path", "password", "binary", "int32", "byte", "json-string"])
def test_a_format_that_only_says_how_a_value_is_used_is_left_out(named: str):
    assert accepts({"type": "string", "format": named}, "any text")


def test_descriptions_are_as_long_as_they_are():
    properties = {f"p{each}": {"type": "string", "description": "z" * 9000} for each in range(20)}
    assert accepts({"type": "object", "properties": properties}, {"p0": "x", "p7": "y"})


def test_models_of_one_kind_each_are_told_apart():
    """A `oneOf` of models with a constant each, which pydantic writes, becomes an `anyOf`."""

    def model(kind: str, **properties: Any) -> dict[str, Any]:
        kinds = {"kind": {"const": kind, "default": kind, "type": "string"}}
        return {"type": "object", "properties": kinds | properties}

    schema = {
        "$defs": {"Cat": model("cat", lives={"type": "integer"}), "Dog": model("dog")},
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    }
    assert accepts(schema, {"kind": "cat", "lives": 9})
    assert accepts(schema, {"kind": "dog"})
    assert not accepts(schema, {"kind": "dog", "lives": 9})
    assert not accepts(schema, {})  # which is of both kinds
    # What is no object would be right by both alternatives, which is wrong by `oneOf`.
    del schema["$defs"]["Dog"]["type"]  # type: ignore[attr-defined]
    with pytest.raises(UnusableGrammar, match="may both be right"):
        compile_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}] * 1200},
        {"allOf": [{"properties": {f"a{each}": {}}} for each in range(900)]},
        {"allOf": [{"properties": {"a": {}}}] * 30_000},
        {"anyOf": [{"$ref": "#/anyOf/0", "properties": {f"p{each}": {}}} for each in range(600)]},
    ],
)
def test_parts_are_read_a_few_times_each(schema: Any, monkeypatch: pytest.MonkeyPatch):
    """However many there are of one name, and whatever they lead to."""
    counts = collections.Counter[str]()
    for name in ("list_in_place", "_list_members"):
        read = getattr(closed_schemas, name)
        monkeypatch.setattr(
            closed_schemas,
            name,
            lambda *given, read=read, name=name: counts.update([name]) or read(*given),
        )
    with contextlib.suppress(UnusableGrammar):
        prepare_schema(schema)
    assert counts["list_in_place"] <= 2500
    assert counts["_list_members"] <= 10_000


@pytest.mark.parametrize("key", ["minItems", "prefixItems", "items", "required", "properties"])
@pytest.mark.parametrize("odd", [None, True, -1, 2.5, "a", [1, "a", None], {"a": 1}, [[{}]]])
def test_odd_values_of_keywords_are_refused_or_followed(key: str, odd: Any):
    rest = {"minItems": 2, "allOf": [{"properties": {"a": {"$ref": "#"}}, "items": {}}]}
    for schema in ({key: odd}, rest | {key: odd}, {"allOf": [rest, {key: odd}]}):
        with contextlib.suppress(UnusableGrammar):
            compile_schema(schema)
