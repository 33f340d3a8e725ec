"""JSON schemas without what enforces nothing, and with alternatives that can be told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rapid.constraints.schemas.schema_parts import follow_reference, map_parts

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly"}
_ANNOTATIONS |= {"writeOnly", "$comment", "$schema", "discriminator"}
# What validators check of a text, so that it cannot be ignored. Others, such as `password` and
# `int32`, say how a value is used (https://json-schema.org/draft/2020-12/json-schema-validation).
_FORMATS = {"date-time", "time", "date", "duration", "email", "idn-email", "hostname"}
_FORMATS |= {"idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference"}
_FORMATS |= {"uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex"}


def simplify_schema(schema: Any) -> Any:
    """Return a schema that allows the same values, or fewer where alternatives were told apart.

    Left out are descriptions and the like. ``oneOf`` becomes ``anyOf`` where a property has other
    values in each alternative, as models of one kind each have: llguidance does not see through
    references that but one of them can be right.
    """

    def simplify(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        said = {key: value for key, value in map_parts(part, simplify).items() if _says(key, value)}
        kind = None if "anyOf" in said else _find_kind(part.get("oneOf"), schema)
        if kind is not None:
            alternatives = said.pop("oneOf")
            said["anyOf"] = [_require(each, kind) for each in alternatives]
        return said

    return simplify(schema)


def _says(key: str, value: Any) -> bool:
    """Return whether a keyword of a schema allows less than there would be without it."""
    if key == "format":
        return not isinstance(value, str) or value in _FORMATS
    if key == "propertyNames":  # names are texts
        return value not in (True, {}, {"type": "string"})
    return key not in _ANNOTATIONS


def _find_kind(alternatives: Any, root: Any) -> str | None:
    """Return the name of a property by which alternatives can be told apart; None for none."""
    if not isinstance(alternatives, list) or not alternatives:
        return None
    found = [_find_constants(each, root) for each in alternatives]
    for name in found[0]:
        values = [each.get(name, ()) for each in found]
        if all(values) and len(set().union(*values)) == sum(map(len, values)):
            return name
    return None


def _find_constants(part: Any, root: Any) -> dict[str, set[str]]:
    """Return the texts that properties of an object may be, where those are few."""
    if isinstance(part, dict) and "$ref" in part:
        part = follow_reference(part["$ref"], root)
    is_object = isinstance(part, dict) and part.get("type") == "object"
    named = part.get("properties") if is_object else None
    found = dict[str, set[str]]()
    for name, value in named.items() if isinstance(named, dict) else ():
        if isinstance(value, dict) and {"const", "enum"} & value.keys():
            texts = [value["const"]] if "const" in value else value["enum"]
            if isinstance(texts, list) and all(isinstance(each, str) for each in texts):
                found[name] = {*texts}
    return found


def _require(alternative: Mapping[str, Any], kind: str) -> dict[str, Any]:
    required = alternative.get("required", [])
    return {**alternative, "required": [*required, *[kind] * (kind not in required)]}
