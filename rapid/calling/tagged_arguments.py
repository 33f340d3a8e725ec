"""Arguments that models write between tags, one by one: their types, their text, their grammar.

A text stands there as it is, and anything else as JSON. Which of them a value is, the schema of the
tool's parameters says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rapid.constraints.schemas.schema_checks import MAX_GRAMMAR, TOO_LONG, UnusableGrammar
from rapid.constraints.schemas.schema_parts import OF_DEFINITIONS, follow_reference, walk_schema

KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")
ANY_KIND = frozenset(KINDS)
_MOST_REFERENCES = 32  # that lead from one to the next, before they are taken for a circle
_NAME = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")  # of a parameter, so that tags can be read back
# What may be said of a value that may be a text; between tags no more could be enforced of one.
_OF_TEXTS = {"type", "title", "description", "default", "examples", "anyOf", "oneOf", "$ref"}
_OF_BOUNDED_TEXTS = {"pattern", "minLength", "maxLength", "format"}
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_FORMATS = {  # those that pydantic writes of a date, a datetime and a UUID; RFC 3339 and 9562
    "date": _DATE,
    "date-time": rf"{_DATE}T([01][0-9]|2[0-3])(:[0-5][0-9]){{2}}(\.[0-9]{{1,9}})?"
    "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
_OF_OBJECTS = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "not", "if")


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """What stands before and behind the value of an argument.

    Attributes:
        before: With ``%s`` for its name.
        after: Its white space, before and behind the tag, belongs to no value.
    """

    before: str
    after: str

    @property
    def closing(self) -> str:
        """The tag behind a value."""
        return self.after.strip()

    @property
    def padding(self) -> str:
        """The white space between a value and the tags around it."""
        return self.after[: self.after.index(self.closing)]

    def write(self, arguments: str) -> str:
        """Return arguments, given as a JSON object, as a model writes them."""
        given: dict[str, Any] = json.loads(arguments)
        return "".join(
            self.before % name + (value if isinstance(value, str) else _spell(value)) + self.after
            for name, value in given.items()
        )


def find_kinds(parameters: str) -> dict[str, frozenset[str]]:
    """Return the JSON types that the parameters of a tool may have, by their names."""
    root = json.loads(parameters)
    given = root.get("properties")
    named = given.items() if isinstance(given, dict) else ()
    return {name: _find_kinds(each, root) for name, each in named}


def _find_kinds(schema: Any, root: Any) -> frozenset[str]:
    return _gather_kinds(schema, root, _MOST_REFERENCES, set()) or ANY_KIND


def _gather_kinds(schema: Any, root: Any, num_left: int, seen: set[int]) -> frozenset[str]:
    """Return the kinds of a schema; none where its own are among those found already."""
    if not isinstance(schema, dict) or not num_left:
        return ANY_KIND
    if id(schema) in seen:  # alternatives may lead to one in as many ways as there are atoms
        return frozenset()
    seen.add(id(schema))
    if "$ref" in schema:
        target = follow_reference(schema["$ref"], root)
        return _gather_kinds(target, root, num_left - 1, seen)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset().union(*map(kinds_of, values))
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        kinds = frozenset(each for each in KINDS if each in given)
        return kinds | ({"integer"} if "number" in kinds else set())
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            found = (_gather_kinds(each, root, num_left - 1, seen) for each in schema[name])
            return frozenset().union(*found)
    return ANY_KIND


def kinds_of(value: Any) -> set[str]:
    """Return the JSON types of a value; a whole number is of two."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def read_value(text: str, kinds: frozenset[str]) -> str:
    """Return the value that a model wrote, as JSON; what is of no other type is a text."""
    said = text.strip()
    if said in ("True", "False", "None"):  # as templates of Jinja write them
        said = {"None": "null"}.get(said, said.lower())
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        return _spell(text)
    return _spell(value) if kinds_of(value) & (kinds - {"string"}) else _spell(text)


def _spell(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_rules(
    index: int, schema: Mapping[str, Any], tags: ArgumentTags, special: Mapping[str, int]
) -> list[str]:
    """Return the rules of a grammar, of which ``arguments_<index>`` is for arguments of a schema.

    They stand in the order of the schema, as they do in JSON.

    Args:
        index: Number of the tool.
        schema: Of its parameters, which `check_schemas` has not refused.
        tags: What stands around values.
        special: The ids of the tags that are tokens of their own.

    Raises:
        UnusableGrammar: It cannot be enforced between tags.
    """
    open_by = next((each for each in _OF_OBJECTS if each in schema), None)
    if open_by is not None or schema.get("additionalProperties"):
        _refuse(open_by or "additionalProperties")
    if "properties" not in schema and "additionalProperties" not in schema:
        return write_any_rules(tags, special, f"_{index}")
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    if {*required} - {*properties}:
        _refuse("required")
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    parts, rules, num_left = [], [], MAX_GRAMMAR
    for number, (name, given) in enumerate(properties.items()):
        if not _NAME.fullmatch(name):
            raise UnusableGrammar(f"has a parameter whose name no tag can have: {name!r}")
        rule = f"argument_{index}_{number}"
        parts.append(rule if name in required else f"{rule}?")
        before = spell_text(tags.before % name, special)
        value = _write_value(f"value_{index}_{number}", given, schema, shared, tags, special)
        rules += [f"{rule}: {before} {value[0]}", *value[1:]]
        num_left -= sum(map(len, [before, *value]))
        if num_left < 0:  # definitions stand beside each parameter that names one
            raise UnusableGrammar(TOO_LONG)
    return [f"arguments_{index}: {' '.join(parts) or json.dumps('')}", *rules]


def _write_value(
    rule: str,
    given: Any,
    root: Mapping[str, Any],
    shared: Mapping[str, Any],
    tags: ArgumentTags,
    special: Mapping[str, int],
) -> list[str]:
    """Return how a value and its closing tag are written, and then the rules for that."""
    kinds, after = _find_kinds(given, root), spell_text(tags.after, special)
    if "string" not in kinds:
        refers = any("$ref" in part for part, _ in walk_schema(given))
        beside = {key: each for key, each in shared.items() if refers or key not in OF_DEFINITIONS}
        return [f"{rule} {after}", f"{rule}: %json {json.dumps(beside | given)}"]
    target, num_left = given, _MOST_REFERENCES
    while num_left and isinstance(target, dict) and "$ref" in target:
        target, num_left = follow_reference(target["$ref"], root), num_left - 1
    if isinstance(target, dict) and {"const", "enum"} & target.keys():
        values = [target["const"]] if "const" in target else target["enum"]
        texts = (each if isinstance(each, str) else _spell(each) for each in values)
        return [f"{rule} {after}", f"{rule}: {' | '.join(map(json.dumps, texts))}"]
    bounds: dict[str, Any] = {}
    if isinstance(target, dict) and target.get("type") == "string":
        bounds = {key: target[key] for key in _OF_BOUNDED_TEXTS & target.keys()}
        given = {key: each for key, each in target.items() if key not in bounds}
    _check_text(given, root, _MOST_REFERENCES, {})
    return [f"{rule}", *write_text(rule, tags, special, bounds)]


def _check_text(
    schema: Any, root: Mapping[str, Any], num_left: int, has_ended: dict[int, bool]
) -> None:
    """Refuse what is said of a value that may be a text and could not be enforced."""
    if not isinstance(schema, dict) or has_ended.get(id(schema)):
        return
    if (found := next((each for each in schema if each not in _OF_TEXTS), None)) is not None:
        _refuse(found)
    if not num_left or id(schema) in has_ended:  # a circle
        _refuse("$ref")
    has_ended[id(schema)] = False
    if "$ref" in schema:
        _check_text(follow_reference(schema["$ref"], root), root, num_left - 1, has_ended)
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        _check_text(each, root, num_left - 1, has_ended)
    has_ended[id(schema)] = True


def write_text(
    rule: str,
    tags: ArgumentTags,
    special: Mapping[str, int],
    bounds: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the rules of a text with its closing tag, of which `rule` is the first.

    Raises:
        UnusableGrammar: It has a pattern whose anchors stand where they cannot be told, or a format
            that is not known.
    """
    after, text, rules = spell_text(tags.after, special), "TEXT", list[str]()
    if bounds:
        text = rule.upper()
        least, most = bounds.get("minLength", 0), bounds.get("maxLength", "")
        parts = [rf"/(.|\n){{{least},{most}}}/"]
        # Else a text that is too short could go on behind the tag, to the next one.
        parts.append(rf"~/(.|\n)*{_spell_regex(re.escape(tags.closing))}(.|\n)*/")
        if "format" in bounds:
            parts.append(f"/{_FORMATS.get(bounds['format']) or _refuse('format')}/")
        if "pattern" in bounds:
            parts.append(f"/{_find_anywhere(bounds['pattern'])}/")
        rules.append(f"{text}: {' & '.join(parts)}")
    if tags.closing in special:  # which is in no text
        return [f"{rule}: {text} {after}", *rules]
    return [f"{rule}[lazy]: {text} {after}", *rules]


def _find_anywhere(pattern: str) -> str:
    """Return the regular expression of whole texts in which a schema's pattern is found."""
    starts = pattern.startswith("^")
    body = pattern[starts:]
    ends = re.search(r"(?<!\\)(?:\\\\)*\$$", body) is not None
    body = body[: len(body) - ends]
    outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", body)
    is_anchored_inside = re.search(r"[$^]", outside) or re.search(r"\\[bBAzZ]", body)
    while (inner := re.sub(r"\([^()]*\)", "", outside)) != outside:
        outside = inner
    if is_anchored_inside or ((starts or ends) and "|" in outside):
        _refuse("pattern")
    before, after = ("" if is_bound else r"(.|\n)*" for is_bound in (starts, ends))
    return f"{before}({_spell_regex(body)}){after}"


def _spell_regex(pattern: str) -> str:
    """Return a regular expression as it stands between slashes."""
    return re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], pattern).replace("\n", r"\n")


def write_any_rules(tags: ArgumentTags, special: Mapping[str, int], suffix: str = "") -> list[str]:
    """Return the rules of ``arguments``, with a suffix, that may be any."""
    before, behind = (spell_text(each, special) for each in tags.before.split("%s"))
    return [
        f"arguments{suffix}: argument{suffix}*",
        f"argument{suffix}: {before} NAME{suffix} {behind} value{suffix}",
        f"NAME{suffix}: /{_NAME.pattern}/",
        *write_text(f"value{suffix}", tags, special),
    ]


def spell_text(text: str, special: Mapping[str, int]) -> str:
    """Return a text in Lark's syntax, with special tokens by their ids."""
    marks = "|".join(map(re.escape, special)) or "(?!)"
    pieces = re.split(f"({marks})", text)
    return " ".join(
        f"<[{special[each]}]>" if each in special else json.dumps(each) for each in pieces if each
    )


def _refuse(keyword: str) -> NoReturn:
    raise UnusableGrammar(
        f"has a schema that cannot be enforced in the form of this model's calls: leave out "
        f"{keyword!r}, or let the model choose whether it calls"
    )
