"""Generated JSON schemas of the kinds that JSONSchemaBench has, and ones that cannot be enforced.

The kinds are those of "Generating Structured Outputs from Language Models: Benchmark and Studies"
(arXiv 2501.10868): nested objects, references, recursion, unions, tuples, maps, and numbers and
strings with bounds. Their shortest answers are short.
"""

from __future__ import annotations

import random
from typing import Any

NUM_SCHEMAS = 500
_DEPTH = 2
_UNUSABLE: dict[str, Any] = {
    "not": {"type": "null"},
    "if": {"type": "null"},
    "uniqueItems": True,
    "contains": {"type": "null"},
    "propertyNames": {"maxLength": 1},
    "dependentRequired": {"a": ["b"]},
    "oneOf": [{"type": "integer", "maximum": 9}, {"type": "integer", "minimum": 5}],
    "format": "json-pointer",
}


def make_schema(rng: random.Random, depth: int = _DEPTH) -> dict[str, Any]:
    """Return a schema of a random kind."""
    if not depth:
        return make_leaf(rng)
    kinds = ["object"] * 3 + ["array", "tuple", "union", "map", "patterns", "all", "leaf"]
    if depth == _DEPTH:  # $ref is from the root
        kinds += ["reference", "recursion"]
    kind = rng.choice(kinds)
    part = make_schema(rng, depth - 1)
    if kind == "object":
        properties = {f"p{i}": make_schema(rng, depth - 1) for i in range(rng.randint(1, 4))}
        required = [name for name in properties if rng.random() < 0.7]
        return make_object(properties, required)
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": part, "minItems": least, "maxItems": least + 2}
    if kind == "tuple":
        parts = [part, make_leaf(rng)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}
    if kind == "union":
        return {"anyOf": [part, make_leaf(rng)]}
    if kind == "map":
        return {"type": "object", "additionalProperties": make_leaf(rng), "maxProperties": 2}
    if kind == "patterns":
        return make_object({}, [], patternProperties={"^x[0-9]$": make_leaf(rng)}, maxProperties=2)
    if kind == "all":
        names = {"a": make_leaf(rng)}, {"b": make_leaf(rng)}
        closed = make_object(names[0] | names[1], ["a"])
        return {"allOf": [{"type": "object", "properties": each} for each in names] + [closed]}
    if kind == "reference":
        named = {"$ref": "#/$defs/part"}
        return make_object({"one": named, "other": named}, ["one"], **{"$defs": {"part": part}})
    if kind == "recursion":
        after = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]}
        link = make_object({"value": make_leaf(rng), "next": after}, ["value", "next"])
        return {"$ref": "#/$defs/link", "$defs": {"link": link}}
    return make_leaf(rng)


def make_object(properties: dict[str, Any], required: list[str], **keywords: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    } | keywords


def make_leaf(rng: random.Random) -> dict[str, Any]:
    """Return a schema of a value without parts."""
    low = rng.randint(-50, 500)
    least = rng.randint(0, 3)
    leaves: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(1, 900)},
        {"type": "integer", "multipleOf": rng.choice([2, 5]), "minimum": 0, "maximum": 60},
        {"type": "number", "minimum": 0, "maximum": rng.choice([1, 10, 99])},
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 1},
        {"type": "string", "maxLength": rng.randint(1, 12)},
        {"type": "string", "minLength": least, "maxLength": least + 2},
        {"type": "string", "pattern": rng.choice(["^[A-Z]{2}-[0-9]{3}$", "^(up|down)s?$"])},
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": rng.randint(1, 5)},
        {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])},
        {"enum": rng.sample(["ship", "town", "isle", 4, None, True, {"a": 1}], 3)},
        {"const": rng.choice(["Varo", 7, False])},
        {"type": rng.choice(["boolean", "null"])},
        {"type": ["integer", "null"], "maximum": 9, "minimum": 0},
    ]
    return rng.choice(leaves)


def make_unusable(rng: random.Random) -> tuple[dict[str, Any], str, str]:
    """Return a schema that cannot be enforced, with the keyword why and its path."""
    keyword = rng.choice(sorted(_UNUSABLE))
    kind = "string" if keyword == "format" else "object"
    schema: dict[str, Any] = {"type": kind, keyword: _UNUSABLE[keyword]}
    if keyword in ("uniqueItems", "contains"):
        schema = {"type": "array", "items": make_leaf(rng), keyword: _UNUSABLE[keyword]}
    if keyword == "oneOf":
        del schema["type"]
    path = "$"
    for level in range(rng.randint(0, 3)):
        name = f"q{level}"
        if rng.random() < 0.5:
            others = {f"p{i}": make_leaf(rng) for i in range(2)}
            schema, path = (
                make_object(others | {name: schema}, [name]),
                f".properties.{name}{path[1:]}",
            )
        else:
            schema, path = {"type": "array", "items": schema}, f".items{path[1:]}"
        path = f"${path}"
    return schema, keyword, path
