"""JSON schemas, regular expressions, choices and rules, compiled into grammars of llguidance.

A request whose form cannot be enforced is refused before it is accepted. A grammar is a text, so
that it travels with a request to every engine that reads for it. JSON has no white space between
its parts: every token then says something, and no answer ends in spaces.
Sources: https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MAX_GRAMMAR = 2**15  # bytes: checking the largest takes tens of milliseconds
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_UNKNOWN_KEYS = "Unimplemented keys: "
_REFUSED = "cannot be followed: "
_OF_NAMES = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
)  # which hold schemas by name
_MOST_TRIED = 100  # parts of a refused schema, to find the one that is to blame: .3 ms each


class UnusableGrammar(ValueError):
    """A grammar that cannot be followed; ``str()`` says why and continues the field's name."""


def compile_schema(schema: object) -> str:
    """Return the grammar of JSON that a JSON schema allows, with closed objects.

    Raises:
        UnusableGrammar: The schema is not one, or has a keyword that cannot be enforced.
    """
    if not isinstance(schema, dict | bool):
        raise UnusableGrammar("must be a JSON schema: an object")
    try:
        return _compile_closed(schema)
    except UnusableGrammar as error:
        raise UnusableGrammar(_name_place(str(error), schema)) from None


def _compile_closed(schema: dict[str, Any] | bool) -> str:
    from llguidance import LLMatcher

    try:
        text = json.dumps(close_objects(schema))
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT)
    except (ValueError, TypeError, RecursionError) as error:
        raise UnusableGrammar(f"is no JSON schema: {error}") from None
    return check_grammar(grammar)


def close_objects(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names.

    What is left is valid by the schema as it was given, and a model that rambles ends its answer
    (xgrammar, vLLM's default, does so too). An object that says what else it may have keeps that,
    and so do the parts of an ``allOf``, which together name its properties.
    """
    if isinstance(schema, list):
        return [close_objects(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {"allOf", "enum", "const", "default", "examples"}
    closed = {key: each if key in kept else close_objects(each) for key, each in schema.items()}
    open_by = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf"}
    if isinstance(schema.get("properties"), dict) and not open_by & schema.keys():
        closed["additionalProperties"] = False
    return closed


def compile_regex(pattern: object) -> str:
    """Return the grammar of texts that match a regular expression as a whole.

    Raises:
        UnusableGrammar: It is none, or has what cannot be enforced, such as look-around.
    """
    from llguidance import LLMatcher

    return check_grammar(LLMatcher.grammar_from_regex(_as_text(pattern)))


def compile_choices(choices: object) -> str:
    """Return the grammar of a few texts, of which the answer is one.

    Raises:
        UnusableGrammar: There are none, or they are too long together.
    """
    texts = choices if isinstance(choices, list | tuple) else ()
    if not texts or not all(isinstance(each, str) and each for each in texts):
        raise UnusableGrammar("must be a list of texts, none of them empty")
    # A string of Lark is written as JSON writes one.
    return compile_lark(f"start: {' | '.join(map(json.dumps, texts))}")


def compile_lark(rules: object) -> str:
    """Return the grammar of rules in llguidance's variant of Lark's syntax.

    Raises:
        UnusableGrammar: The rules are none.
    """
    from llguidance import LLMatcher

    return check_grammar(LLMatcher.grammar_from_lark(_as_text(rules)))


def _as_text(given: object) -> str:
    try:
        if not isinstance(given, str) or not given.encode().strip():
            raise UnusableGrammar("must be a text that is not empty")
    except UnicodeEncodeError:
        raise UnusableGrammar("has a lone surrogate (half of an escaped character)") from None
    return given


def check_grammar(grammar: str) -> str:
    """Return a grammar that can be followed.

    Raises:
        UnusableGrammar: It cannot.
    """
    from llguidance import LLMatcher

    if len(grammar.encode()) > MAX_GRAMMAR:
        raise UnusableGrammar(f"is too long: {MAX_GRAMMAR} bytes at most")
    _, findings = LLMatcher.validate_grammar_with_warnings(grammar)
    if findings:
        lines = [line.strip() for line in findings[0].splitlines() if line.strip()]
        # A parser of regular expressions shows the place first and says the reason last.
        reasons = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
        raise UnusableGrammar(f"{_REFUSED}{next(reasons, lines[0])}")
    return grammar


def _name_place(finding: str, schema: Any) -> str:
    """Return a finding with the place of the keyword that it is about, where it names one."""
    if not finding.startswith(_REFUSED):
        return finding  # it is too long, or no schema at all
    _, found, names = finding.partition(_UNKNOWN_KEYS)
    if found:
        keyword = json.loads(names)[0]
        place = next(_find_key(schema, keyword, "$"), "$")
        return f"has a keyword that is not supported: {keyword!r}, at {place}"
    part, place = _find_refused(schema, finding)
    said = [key for key in part if key.lower() in finding.lower()]
    return f"{finding}, at {'.'.join([place, *said[:1]])}"


def _find_refused(schema: Any, finding: str) -> tuple[Any, str]:
    """Return the smallest part of a schema that is refused for the same reason, and its path."""
    root, part, place, num_left = schema, schema, "$", _MOST_TRIED
    parts = list(_list_parts(part, place))
    while parts and num_left:
        num_left -= 1
        tried, path = parts.pop(0)
        try:
            _compile_closed(
                tried | {key: root[key] for key in ("$defs", "definitions") if key in root}
            )
        except UnusableGrammar as error:
            if str(error) == finding:
                part, place, parts = tried, path, list(_list_parts(tried, path))
    return part, place


def _list_parts(part: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects right below a part of a schema, or below its lists, with their paths."""
    pairs = part.items() if isinstance(part, dict) else ()
    for key, value in pairs:
        path = f"{place}.{key}"
        if key in _OF_NAMES and isinstance(value, dict):
            yield from (
                (each, f"{path}.{name}") for name, each in value.items() if isinstance(each, dict)
            )
        elif isinstance(value, dict):
            yield value, path
        elif isinstance(value, list):
            yield from (
                (each, f"{path}[{i}]") for i, each in enumerate(value) if isinstance(each, dict)
            )


def _find_key(part: Any, keyword: str, place: str) -> Iterator[str]:
    """Yield the JSON paths of the objects of a schema that have a keyword."""
    if isinstance(part, dict):
        if keyword in part:
            yield place
        for key, value in part.items():
            yield from _find_key(value, keyword, f"{place}.{key}")
    elif isinstance(part, list):
        for index, value in enumerate(part):
            yield from _find_key(value, keyword, f"{place}[{index}]")
