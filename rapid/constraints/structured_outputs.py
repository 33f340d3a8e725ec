"""JSON schemas, regular expressions, choices and rules, compiled into grammars of llguidance.

A request whose form cannot be enforced is refused before it is accepted. A grammar is a text, so
that it travels with a request to every engine that reads for it. JSON has no white space between
its parts: every token then says something, and no answer ends in spaces.
Sources: https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from rapid.constraints.grammar_checks import TOO_COMPLEX, find_fault

MAX_GRAMMAR = 2**15  # bytes: checking the largest takes tens of milliseconds
MAX_DEPTH = 100  # objects and lists in each other: llguidance reads 127, with what it puts around
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_UNKNOWN_KEYS = "Unimplemented keys: "
_TOO_LONG = f"is too long: {MAX_GRAMMAR} bytes at most"
_REFUSED = "cannot be followed: "
_OF_NAMES = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
)  # which hold schemas by name
_MOST_TRIED = 40  # parts of a refused schema, to find the one that is to blame by halves
_MOST_REMAINDERS = 10_000  # a matcher has a state for each: 0.03 s and 4 MB, as 100,000 take 0.8 s
# What one text must match together doubles a state each: 12 take 0.6 s and 17 all memory.
_MOST_PATTERNS = 8
_MOST_PASSES = 32  # over a schema, until its references have told what they lead to
_DATA = {"const", "enum", "default", "examples"}  # keywords whose values are no schemas
# What may hide a sign, and the signs. Source: parser/src/lark/lexer.rs of llguidance.
_LARK = re.compile(
    # A string or an expression that has no end reaches to the end of all, so that it is read once.
    r"<[^<>\s]+>|\"(?:\\.|[^\"\\])*+\"?|(?:#|//)[^\n]*|/(?:\\.|[^/\\])++/?|%json\s*|&|~\s*[0-9]?"
)


class UnusableGrammar(ValueError):
    """A grammar that cannot be followed; ``str()`` says why and continues the field's name."""


def compile_schema(schema: object) -> str:
    """Return the grammar of JSON that a JSON schema allows, with closed objects.

    Raises:
        UnusableGrammar: The schema is not one, or has a keyword that cannot be enforced.
    """
    if not isinstance(schema, dict | bool):
        raise UnusableGrammar("must be a JSON schema: an object")
    check_schema(schema)
    try:
        return check_grammar(_write_closed(schema))
    except UnusableGrammar as error:
        raise UnusableGrammar(_name_place(str(error), schema)) from None


def _write_closed(schema: dict[str, Any] | bool) -> str:
    from llguidance import LLMatcher

    try:
        text = json.dumps(close_objects(schema))
        grammar: str = LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT)
    except (ValueError, TypeError) as error:
        raise UnusableGrammar(f"is no JSON schema: {error}") from None
    return grammar


def check_schema(schema: Any) -> None:
    """Refuse, by path and keyword, what llguidance would compute without end, whatever its limits.

    It compiles such a schema, and is lost at some token of an answer, in an engine.

    Raises:
        UnusableGrammar: There is such a thing, or the schema is too long or nested too deeply.
    """
    try:
        text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, TypeError) as error:
        raise UnusableGrammar(f"is no JSON schema: {error}") from None
    except RecursionError:
        text = ""
    if not text or is_too_deep(schema):
        raise UnusableGrammar(f"is nested too deeply: {MAX_DEPTH} levels at most")
    if len(text) > MAX_GRAMMAR:  # else what follows would take long
        raise UnusableGrammar(_TOO_LONG)
    num_remainders = 1
    for part, place in _walk(schema, "$"):
        num_remainders = math.lcm(num_remainders, _count_remainders(part.get("multipleOf")))
        if num_remainders > _MOST_REMAINDERS:
            raise UnusableGrammar(
                "has a number that takes too long to follow: the least common multiple of all "
                f"'multipleOf' may be {_MOST_REMAINDERS:,}, without points, at {place}.multipleOf"
            )
    _check_patterns(schema)


def is_too_deep(given: object) -> bool:
    """Return whether a value of JSON has more than `MAX_DEPTH` objects and lists in each other."""
    level = [given] if isinstance(given, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def _count_remainders(multiple: object) -> int:
    """Return the number of remainders by a number, of which each digit more has another."""
    if isinstance(multiple, int):
        return abs(multiple) or 1
    if not isinstance(multiple, float) or not math.isfinite(multiple):
        return 1
    _, digits, exponent = Decimal(repr(multiple)).normalize().as_tuple()
    return int("".join(map(str, digits))) * 10 ** max(0, int(exponent)) or 1


def _check_patterns(root: Any) -> None:
    """Refuse a text that must match too many regular expressions together.

    Those of an `allOf` and of what a part's references lead to are added, those of alternatives
    and of an object's parts are not. Objects that are joined may have one part, so that a part has
    the most that any of its own has. Counts grow pass by pass, as references may be a circle.
    """
    parts = list(_walk(root, "$"))
    counts = {id(part): 0 for part, _ in parts}
    # References are from another root then.
    has_ids = any(isinstance(part.get(key), str) for part, _ in parts[1:] for key in ("$id", "id"))

    def count(part: Mapping[str, Any], most: int) -> int:
        num = sum(isinstance(part.get(key), str) for key in ("pattern", "format"))
        most_inner = 0
        for key, value in part.items():
            inner = [counts[id(each)] for each, _ in _list_parts({key: value}, "")]
            if key == "$ref":
                found = None if has_ids else follow_reference(value, root)
                num += most if found is None else counts.get(id(found), 0)
            elif key in ("allOf", "anyOf", "oneOf"):
                num += sum(inner) if key == "allOf" else max(inner, default=0)
            elif key not in _DATA and key not in ("$defs", "definitions"):
                most_inner = max([most_inner, *inner])
        return num + most_inner

    for _ in range(_MOST_PASSES):
        before, most = dict(counts), max(counts.values(), default=0)
        parts.reverse()  # so that references to what comes before or behind need a pass or two
        for part, place in parts:
            counts[id(part)] = count(part, most)
            if counts[id(part)] > _MOST_PATTERNS:
                raise UnusableGrammar(
                    f"has more than {_MOST_PATTERNS} regular expressions ('pattern', 'format') "
                    f"that one text must match together, at {place}"
                )
        if counts == before:
            return
    raise UnusableGrammar("has references ('$ref') that lead from one to the next too often")


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
    if sum(map(len, texts)) > MAX_GRAMMAR:
        raise UnusableGrammar(_TOO_LONG)
    # A string of Lark is written as JSON writes one.
    return compile_lark(f"start: {' | '.join(map(json.dumps, texts))}")


def compile_lark(rules: object) -> str:
    """Return the grammar of rules in llguidance's variant of Lark's syntax.

    Raises:
        UnusableGrammar: The rules are none, or join regular expressions by ``&`` or ``~``.
    """
    from llguidance import LLMatcher

    text = _as_text(rules)
    _check_rules(text)
    return check_grammar(LLMatcher.grammar_from_lark(text))


def _check_rules(rules: str) -> None:
    """Refuse what `check_schema` does of schemas among rules, and what would do the same."""
    at = 0
    while (match := _LARK.search(rules, at)) is not None:
        at, sign = match.end(), match[0]
        if sign[0] in "&~" and not sign[-1].isdecimal():
            line = rules.count("\n", 0, at) + 1
            raise UnusableGrammar(f"must join no regular expressions by {sign[0]!r}: line {line}")
        if sign.startswith("%json"):
            try:
                schema, at = json.JSONDecoder().raw_decode(rules, at)
            except (ValueError, RecursionError):
                raise UnusableGrammar("has no JSON behind %json") from None
            check_schema(schema)


def _as_text(given: object) -> str:
    try:
        if not isinstance(given, str) or not given.encode().strip():
            raise UnusableGrammar("must be a text that is not empty")
    except UnicodeEncodeError:
        raise UnusableGrammar("has a lone surrogate (half of an escaped character)") from None
    if len(given) > MAX_GRAMMAR:  # else looking through it takes long
        raise UnusableGrammar(_TOO_LONG)
    return given


def check_grammar(grammar: str) -> str:
    """Return a grammar that can be followed.

    Raises:
        UnusableGrammar: It cannot.
    """
    if len(grammar.encode()) > MAX_GRAMMAR:
        raise UnusableGrammar(_TOO_LONG)
    if fault := find_fault(grammar):
        raise UnusableGrammar(fault if fault == TOO_COMPLEX else f"{_REFUSED}{fault}")
    return grammar


def _name_place(finding: str, schema: Any) -> str:
    """Return a finding with the place of the keyword that it is about, where it names one."""
    if not finding.startswith(_REFUSED):
        return finding  # it is too long, or no schema at all
    _, found, names = finding.partition(_UNKNOWN_KEYS)
    if found:
        keyword = json.loads(names)[0]
        place = next((place for part, place in _walk(schema, "$") if keyword in part), "$")
        return f"has a keyword that is not supported: {keyword!r}, at {place}"
    part, place = _find_refused(schema, finding)
    said = [key for key in part if key.lower() in finding.lower()]
    return f"{finding}, at {'.'.join([place, *said[:1]])}"


def _find_refused(schema: Any, finding: str) -> tuple[Any, str]:
    """Return the smallest part of a schema that is refused for the same reason, and its path."""
    part, place = schema, "$"
    parts = list(_list_parts(part, place))
    for _ in range(_MOST_TRIED):
        if not parts:
            break
        half = parts[: (len(parts) + 1) // 2]
        if not _is_refused([each for each, _ in half], schema, finding):
            parts = parts[len(half) :]
        elif len(half) > 1:
            parts = half
        else:
            ((part, place),) = half
            parts = list(_list_parts(part, place))
    return part, place


def _is_refused(parts: Sequence[dict[str, Any]], root: Any, finding: str) -> bool:
    """Return whether one of some parts is refused for a reason, or if all are so together."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    tried = [*parts]
    if len(parts) > 1:
        # Of a property that nothing satisfies is no word, nor of those beside an empty alternative.
        named = {f"{index}": part for index, part in enumerate(parts)}
        tried = [{"properties": named}, {"anyOf": [*parts]}]
    return any(f"{_REFUSED}{find_fault(_write_closed(each | shared))}" == finding for each in tried)


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


def _walk(part: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield all objects of a value of JSON with their paths, each before those within it."""
    if isinstance(part, dict):
        yield part, place
        for key, value in part.items():
            yield from _walk(value, f"{place}.{key}")
    elif isinstance(part, list):
        for index, value in enumerate(part):
            yield from _walk(value, f"{place}[{index}]")
