"""JSON schemas, regular expressions, choices and rules, compiled into grammars of llguidance.

A request whose form cannot be enforced is refused before it is accepted. A grammar is a text, so
that it travels with a request to every engine that reads for it. JSON has no white space between
its parts: every token then says something, and no answer ends in spaces.
Sources: https://github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rapid.constraints.grammar_checks import find_fault, measure_fault
from rapid.constraints.schemas.refused_parts import MOST_CPU_S, name_place, tell_fault
from rapid.constraints.schemas.schema_checks import (
    MAX_GRAMMAR,
    TOO_LONG,
    UnusableGrammar,
    prepare_schema,
)

_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
# What may hide a sign, and the signs. Source: parser/src/lark/lexer.rs of llguidance.
_LARK = re.compile(
    # A string or an expression that has no end reaches to the end of all, so that it is read once.
    r"<[^<>\s]+>|\"(?:\\.|[^\"\\])*+\"?|(?:#|//)[^\n]*|/(?:\\.|[^/\\])++/?|%json\s*|&|~\s*[0-9]?"
)


def compile_schema(schema: object) -> str:
    """Return the grammar of JSON that a JSON schema allows, with closed objects.

    Raises:
        UnusableGrammar: The schema is not one, or has a keyword that cannot be enforced.
    """
    if not isinstance(schema, dict | bool):
        raise UnusableGrammar("must be a JSON schema: an object")
    prepared = prepare_schema(schema)
    try:
        return check_grammar(write_schema(prepared))
    except UnusableGrammar as error:
        raise UnusableGrammar(name_place(str(error), prepared, write_schema)) from None


def write_schema(prepared: Any) -> str:
    """Return the grammar of a schema as it is, which nobody has checked."""
    from llguidance import LLMatcher

    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(prepared), overrides=_COMPACT))
    except (ValueError, TypeError) as error:
        raise UnusableGrammar(f"is no JSON schema: {error}") from None


def check_schemas(prepared: Sequence[Any]) -> None:
    """Check some schemas as one grammar, which takes as long as one of them may.

    Raises:
        UnusableGrammar: One cannot be enforced, whose index it has, or all together cannot.
    """
    from llguidance import LLMatcher

    rules = [f"schema_{index}: %json {json.dumps(each)}" for index, each in enumerate(prepared)]
    if sum(map(len, rules)) > MAX_GRAMMAR:
        raise UnusableGrammar(TOO_LONG)
    heads = (f'"{index} " schema_{index}' for index in range(len(prepared)))
    rules = [f"start: {' | '.join(heads)}", *rules]
    fault = find_fault(LLMatcher.grammar_from_lark("\n".join(rules))) if prepared else ""
    if not fault:
        return
    cpu_s = 0.0
    for index, each in enumerate(prepared):
        found, spent_s = measure_fault(write_schema(each))
        if found:
            raise UnusableGrammar(name_place(tell_fault(found), each, write_schema), index)
        if (cpu_s := cpu_s + spent_s) > MOST_CPU_S:
            break
    raise UnusableGrammar(tell_fault(fault))


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
        raise UnusableGrammar(TOO_LONG)
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
    """Refuse what `prepare_schema` does of schemas among rules, and what would do the same."""
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
            prepare_schema(schema)


def _as_text(given: object) -> str:
    try:
        if not isinstance(given, str) or not given.encode().strip():
            raise UnusableGrammar("must be a text that is not empty")
    except UnicodeEncodeError:
        raise UnusableGrammar("has a lone surrogate (half of an escaped character)") from None
    if len(given) > MAX_GRAMMAR:  # else looking through it takes long
        raise UnusableGrammar(TOO_LONG)
    return given


def check_grammar(grammar: str) -> str:
    """Return a grammar that can be followed.

    Raises:
        UnusableGrammar: It cannot.
    """
    if len(grammar.encode()) > MAX_GRAMMAR:
        raise UnusableGrammar(TOO_LONG)
    if fault := find_fault(grammar):
        raise UnusableGrammar(tell_fault(fault))
    return grammar
