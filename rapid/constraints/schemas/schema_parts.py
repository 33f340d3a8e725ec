"""The parts of a JSON schema: those right below a part, all of them, and what references name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

OF_NAMES = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
"""Keywords that hold schemas by names, of which none is a keyword."""
OF_DEFINITIONS = {"$defs", "definitions"}
"""Keywords whose schemas are of nothing, unless a reference names them."""
OF_DATA = {"const", "enum", "default", "examples"}
"""Keywords whose values are no schemas, whatever they look like."""
IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
"""Keywords that say more of the same value."""


def list_parts(part: Mapping[str, Any], place: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the schemas right below a part of a schema, with their paths."""
    for key, value in part.items():
        path = f"{place}.{key}"
        if key in OF_DATA:
            continue
        if key in OF_NAMES and isinstance(value, dict):
            yield from (
                (each, f"{path}.{name}") for name, each in value.items() if isinstance(each, dict)
            )
        elif isinstance(value, dict):
            yield value, path
        elif isinstance(value, list):
            yield from (
                (each, f"{path}[{i}]") for i, each in enumerate(value) if isinstance(each, dict)
            )


def map_parts(part: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a part of a schema with those right below it, and lists of them, changed."""

    def map_value(key: str, value: Any) -> Any:
        if key in OF_DATA:
            return value
        if key in OF_NAMES and isinstance(value, dict):
            return {name: change(each) for name, each in value.items()}
        return [change(each) for each in value] if isinstance(value, list) else change(value)

    return {key: map_value(key, value) for key, value in part.items()}


def walk_schema(root: object, place: str = "$") -> Iterator[tuple[dict[str, Any], str]]:
    """Yield all parts of a schema with their paths, each before those within it."""
    if isinstance(root, dict):
        yield root, place
        for part, path in list_parts(root, place):
            yield from walk_schema(part, path)


def list_in_place(part: Mapping[str, Any], root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas that say more of the same value as a part does, each with its keyword."""
    for key in IN_PLACE:
        value = part.get(key)
        found = [follow_reference(value, root)] if key == "$ref" else value
        if isinstance(found, list):
            yield from ((key, each) for each in found if isinstance(each, dict))


def follow_reference(reference: Any, root: Any) -> Any:
    """Return what a reference within a schema names; None if it is not there."""
    path = unquote(reference).split("/") if isinstance(reference, str) else [""]
    found = root if path[0] == "#" else None
    for each in path[1:]:
        key = each.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal():
            found = found[int(key)] if int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found
