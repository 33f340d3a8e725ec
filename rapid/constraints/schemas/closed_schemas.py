"""JSON schemas as they are compiled: with closed objects, and without what enforces nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from rapid.constraints.schemas.schema_parts import OF_DATA, OF_NAMES, list_in_place, walk_schema

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly"}
_ANNOTATIONS |= {"writeOnly", "$comment", "$schema", "discriminator"}
# What validators check of a text, so that it cannot be ignored. Others, such as `password` and
# `int32`, say how a value is used (https://json-schema.org/draft/2020-12/json-schema-validation).
_FORMATS = {"date-time", "time", "date", "duration", "email", "idn-email", "hostname"}
_FORMATS |= {"idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference"}
_FORMATS |= {"uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex"}
_OPEN_BY = {"additionalProperties", "patternProperties", "unevaluatedProperties"}

Part: TypeAlias = dict[str, Any]


def close_schema(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names.

    What is left is valid by the schema as it was given, and a model that rambles ends its answer
    (xgrammar, vLLM's default, does so too). An object that says what else it may have keeps that,
    and so does one whose properties stand in several parts: none of them has all of the names.
    """
    is_open = _find_joined(schema).keys()

    def close(part: Any) -> Any:
        if isinstance(part, list):
            return [close(each) for each in part]
        if not isinstance(part, dict):
            return part
        every = ((key, write(key, value)) for key, value in part.items())
        closed = {key: value for key, value in every if _says(key, value)}
        is_whole = isinstance(part.get("properties"), dict) and id(part) not in is_open
        if is_whole and not _OPEN_BY & part.keys():
            closed["additionalProperties"] = False
        return closed

    def write(key: str, value: Any) -> Any:
        if key in OF_NAMES and isinstance(value, dict):
            return {name: close(each) for name, each in value.items()}
        return value if key in OF_DATA else close(value)

    return close(schema)


def _says(key: str, value: Any) -> bool:
    """Return whether a keyword of a schema allows less than there would be without it."""
    if key == "format":
        return not isinstance(value, str) or value in _FORMATS
    if key == "propertyNames":  # names are texts
        return value not in (True, {}, {"type": "string"})
    return key not in _ANNOTATIONS


def _find_joined(root: Any) -> dict[int, Part]:
    """Return the parts of a schema that say something of an object of which others do as well."""
    parts = [part for part, _ in walk_schema(root)]
    sources = defaultdict[int, list[Part]](list)  # the parts of which each part says more
    for part in parts:
        for _, more in list_in_place(part, root):
            sources[id(more)].append(part)
    with_names = [part for part in parts if "properties" in part]
    of_objects = _reach(with_names, lambda part: sources[id(part)])
    by_name = defaultdict[str, list[Part]](list)

    def list_joined(part: Part) -> Iterator[Part]:
        yield from (more for _, more in list_in_place(part, root))
        named = part.get("properties")
        for name, value in named.items() if isinstance(named, dict) else ():
            if isinstance(value, dict):
                by_name[name].append(value)
            if len(by_name[name]) > 1:  # what has one name in several parts is one value
                yield from by_name[name]

    def is_told_in_parts(part: Part) -> bool:
        more = [each for each in list_in_place(part, root) if id(each[1]) in of_objects]
        # Of alternatives but one is chosen.
        sayings = {id(each) if key == "allOf" else key for key, each in more}
        return len(sayings) + ("properties" in part) > 1

    return _reach([part for part in parts if is_told_in_parts(part)], list_joined)


def _reach(parts: Iterable[Part], follow: Callable[[Part], Iterable[Part]]) -> dict[int, Part]:
    """Return some parts and those to which they lead, by their ids."""
    found, waiting = dict[int, Part](), [*parts]
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting += follow(part)
    return found
