"""Grammars that would take a server's time or memory are refused by their place, in little."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits

from rapid.calling.call_forms import QWEN_CODER
from rapid.calling.tagged_arguments import find_kinds, write_rules
from rapid.checkpoints.files import load_tokenizer
from rapid.checkpoints.text import ChatText
from rapid.constraints import grammars as grammars_module
from rapid.constraints import structured_outputs
from rapid.constraints.grammar_checks import TOO_COMPLEX, find_fault, measure_fault
from rapid.constraints.grammars import Grammars, GrammarShaping
from rapid.constraints.schemas import refused_parts
from rapid.constraints.schemas.schema_checks import MAX_DEPTH, UnusableGrammar
from rapid.constraints.structured_outputs import (
    check_schemas,
    compile_choices,
    compile_lark,
    compile_regex,
    compile_schema,
)
from rapid.errors import BadRequest, GrammarTooComplex
from tests.rapid.constraints.json_schemas import NUM_SCHEMAS, make_schema, make_unusable


def texts(num: int, start: int = 0) -> list[dict[str, Any]]:
    """Return schemas of texts that each have a pattern of their own."""
    places = range(start, start + num)
    return [{"type": "string", "pattern": f"(.*a.{{{each}}}b.*)"} for each in places]


def a(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


CHAIN = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(60)} | {"d60": texts(1)[0]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"allOf": texts(14)}, r"at \$$"),
        (a({"items": {"allOf": texts(14)}}), r"at \$\.properties\.a\.items$"),
        (texts(1)[0] | {"allOf": [{"allOf": texts(4, 1)}, {"allOf": texts(4, 5)}]}, r"at \$$"),
        ({"allOf": [a(each) for each in texts(9)]}, r"at \$$"),
        ({"$defs": {"x": {"allOf": texts(5)}}, "allOf": [{"$ref": "#/$defs/x"}, *texts(4, 9)]}, ""),
        ({"allOf": [{"$ref": "#/allOf/1"}, {"allOf": texts(8)}, *texts(1, 9)]}, r"at \$$"),
        # A reference by a name that is not looked up may lead anywhere.
        ({"$defs": {"x": {"$anchor": "y", "allOf": texts(8)}}, "$ref": "#y", "format": "date"}, ""),
        # Each turn of the circle would add one.
        (
            {
                "$defs": {"x": texts(1)[0] | {"anyOf": [{"$ref": "#/$defs/x"}, {"minLength": 1}]}},
                "$ref": "#/$defs/x",
            },
            "",
        ),
    ],
)
def test_too_many_patterns_of_one_text_are_refused_before_they_are_joined(
    schema: Any, place: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(structured_outputs, "find_fault", lambda _: pytest.fail("it was compiled"))
    with pytest.raises(UnusableGrammar, match=f"more than 8 regular expressions.*{place}"):
        compile_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{at}": each for at, each in enumerate(texts(40))}},
        {"anyOf": [a(each) for each in texts(20)]},
        {"allOf": [a({"type": "string", "pattern": "^a$"})] * 8},
        {"$ref": "#/$defs/d0", "$defs": CHAIN},
        {"$ref": "#/$defs/d0", "$defs": dict(reversed(CHAIN.items()))},
        a({"$ref": "#"}) | {"required": []},
    ],
)
def test_patterns_of_texts_that_are_apart_are_not_added(schema: Any):
    assert compile_schema(schema)


@pytest.mark.parametrize(
    ("number", "place"),
    [
        ({"multipleOf": 999_983}, r"\.multipleOf"),
        ({"multipleOf": 10_007}, r"\.multipleOf"),
        ({"multipleOf": 1.0007}, r"\.multipleOf"),
        ({"multipleOf": 1e300}, r"\.multipleOf"),
        # What follows both has as many states as both have remainders.
        ({"anyOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, ""),
        ({"multipleOf": 997, "allOf": [{"$ref": "#/$defs/n"}]}, r"\.multipleOf"),
        ({"oneOf": [a({"multipleOf": 997}), a({"items": {"$ref": "#/$defs/n"}})]}, ""),
        ({"multipleOf": 4096}, None),
        ({"anyOf": [{"multipleOf": 5}, {"multipleOf": 0.01}, {"multipleOf": 100}]}, None),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}, None),
        (a({"multipleOf": 997}), None),
        ({"const": {"multipleOf": 999_983}}, None),
    ],
)
def test_numbers_with_too_many_remainders_are_refused(number: Any, place: str | None):
    """Each stands beside another one that does not count, as it is at another place."""
    schema = a(number) | {"$defs": {"n": {"type": "number", "multipleOf": 991}}}
    schema["properties"]["b"] = {"type": "number", "multipleOf": 9967}
    if place is None:
        assert compile_schema(schema)
        return
    with pytest.raises(UnusableGrammar, match=rf"takes too long.*at \$\.properties\.a{place}$"):
        compile_schema(schema)


def test_odd_multiples_are_refused():
    for odd in (0, True, "2", None):
        with pytest.raises(UnusableGrammar):
            compile_schema({"type": "integer", "multipleOf": odd})


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ("start: X\nX: /a+/ & /.*b/", "by '&': line 2"),
        ("start: X\nX: ~/a+/", "by '~': line 2"),
        ("start: X\nX: (~ Y | ~Y)\nY: /a/", "by '~': line 2"),
        ('start: "\\"" X "\\\\"\nX: /\\/"/ & /a/', "by '&': line 2"),
        ('start: <[7]> X // "\nX: /a/ & /b/ // "', "by '&': line 2"),
        ('start: %json {"multipleOf": 999983}', r"multipleOf.*at \$\.multipleOf"),
        ('start: "a" | %json\n ' + json.dumps({"allOf": texts(9)}), "8 regular"),
        ("start: %json [", "no JSON behind %json"),
        ("start: %json " + "[" * 9000, "no JSON behind %json"),
    ],
)
def test_rules_hide_nothing_that_schemas_may_not_have(rules: str, why: str):
    with pytest.raises(UnusableGrammar, match=why):
        compile_lark(rules)


@pytest.mark.parametrize(
    "rules",
    [
        'start: "a & ~b" X~3 Y ~ 2..4 // & ~\nX: /~a&\\/~/ # & "\nY: "\\"&"',
        'start: %json {"const": "& ~"} "~"',
    ],
)
def test_signs_that_join_nothing_are_kept(rules: str):
    assert compile_lark(rules)


@pytest.mark.parametrize(
    "schema",
    [
        # Each of the names' patterns is compared with each other one.
        {"type": "object", "patternProperties": {f"^{each}_": {} for each in range(600)}},
        # There is a rule for each property that may be the one: two gigabytes.
        {
            "type": "object",
            "properties": {f"{each}": {} for each in range(900)},
            "additionalProperties": False,
            "minProperties": 1,
        },
    ],
)
def test_what_compiles_without_end_is_given_up_and_others_are_not(schema: Any):
    with pytest.raises(UnusableGrammar, match=f"^{TOO_COMPLEX}$"):
        compile_schema(schema)
    assert compile_schema(a({"type": "string"}))


def test_a_process_that_has_ended_is_begun_again():
    from rapid.constraints.grammar_checks import _CHECKS

    grammar = LLMatcher.grammar_from_regex("a{1,7}")
    measure_fault.cache_clear()
    assert not find_fault(grammar)
    process = _CHECKS._process
    assert process is not None
    process.kill()
    process.wait()
    measure_fault.cache_clear()
    assert not find_fault(grammar)
    assert _CHECKS._process is not process


def test_a_grammar_that_was_checked_is_not_checked_again(monkeypatch: pytest.MonkeyPatch):
    compile_regex("ab{2,9}")
    monkeypatch.setattr("rapid.constraints.grammar_checks._CHECKS", None)
    assert compile_regex("ab{2,9}")


@pytest.mark.parametrize("num_levels", [MAX_DEPTH, MAX_DEPTH + 1, 600, 5000])
@pytest.mark.parametrize("is_list", [True, False])
def test_what_is_nested_is_bounded(num_levels: int, is_list: bool):
    value: Any = None
    for _ in range(num_levels - 1):  # around which is an object
        value = [value] if is_list else {"a": value}
    if num_levels <= MAX_DEPTH:
        assert compile_schema({"const": value})
        return
    with pytest.raises(UnusableGrammar, match="nested too deeply: 100 levels"):
        compile_schema({"const": value})


def test_the_place_among_many_parts_is_found_by_halves(monkeypatch: pytest.MonkeyPatch):
    asked = list[str]()
    monkeypatch.setattr(
        refused_parts, "measure_fault", lambda given: asked.append(given) or measure_fault(given)
    )
    unknown = {"type": "string", "format": "json-pointer"}
    names = [f"p{each}" for each in range(500)]
    for which in (0, 137, 499):
        whole: dict[str, Any] = {"type": "object", "properties": {each: {} for each in names}}
        whole["properties"][f"p{which}"] = {"anyOf": [{"type": "integer"}] * 99 + [unknown]}
        asked.clear()
        with pytest.raises(UnusableGrammar) as refused:
            compile_schema(whole)
        assert str(refused.value).endswith(f"at $.properties.p{which}.anyOf[99].format")
        assert len(asked) < 60
    nothing = {"type": "integer", "minimum": 5, "maximum": 3}
    with pytest.raises(UnusableGrammar, match=r"at \$\.anyOf\[0\]\.minimum$"):
        compile_schema({"anyOf": [nothing | {"title": f"{each}"} for each in range(150)]})


def test_the_search_for_a_place_takes_no_longer_than_a_check(monkeypatch: pytest.MonkeyPatch):
    """Each part of this takes a third of what one grammar may."""
    asked = list[str]()

    def measure(grammar: str) -> tuple[str, float]:
        asked.append(grammar)
        return ("Missing operand" if "(?=a)" in grammar else "", 0.17)

    monkeypatch.setattr(refused_parts, "measure_fault", measure)
    monkeypatch.setattr(structured_outputs, "find_fault", lambda grammar: measure(grammar)[0])
    deep: Any = {"type": "string", "pattern": "(?=a)b"}
    for _ in range(30):
        deep = a(deep)
    with pytest.raises(UnusableGrammar, match=r"Missing operand, at \$\.properties\.a\.prop"):
        compile_schema(deep)
    assert len(asked) == 1 + 3


def test_many_schemas_are_checked_as_one(monkeypatch: pytest.MonkeyPatch):
    asked = list[str]()
    monkeypatch.setattr(
        structured_outputs, "find_fault", lambda given: asked.append(given) or find_fault(given)
    )
    check_schemas([a({"type": "string", "maxLength": each}) for each in range(128)])
    check_schemas([])
    assert len(asked) == 1
    with pytest.raises(UnusableGrammar, match=r"look-.*at \$\.properties\.a$") as refused:
        check_schemas([a({}), a({"type": "string", "pattern": "(?=a)b"}), a({})])
    assert refused.value.index == 1
    with pytest.raises(UnusableGrammar, match="is too long") as refused:
        check_schemas([a({"enum": ["b" * 9000]})] * 5)
    assert refused.value.index is None
    # Each is taken, and all together are not.
    heavy = [{"patternProperties": {f"^{j}_{i}": {} for j in range(110)}} for i in range(16)]
    with pytest.raises(UnusableGrammar, match=TOO_COMPLEX) as refused:
        check_schemas(heavy)
    assert refused.value.index is None


def test_an_engine_has_the_limits_of_the_door():
    text = ChatText.load("embedded:target")
    grammars = Grammars(load_tokenizer("embedded:target"), text.eos_ids, 1024)
    # Each terminal is twice the one behind it, which makes a million in a few lines.
    names = [chr(65 + each) for each in range(25)]
    rules = "\n".join(f"{name}: {chr(ord(name) + 1)} {chr(ord(name) + 1)}" for name in names[:-1])
    grammar = LLMatcher.grammar_from_lark(f'start: A\n{rules}\nY: "x"')
    assert find_fault(grammar)
    with pytest.raises(GrammarTooComplex):
        grammars.open(grammar)


def test_rules_without_an_end_are_looked_through_once():
    """Each escaped quote, or slash, may begin a string that is never closed."""
    for text in ('\\"' * 2**14, "\\/" * 2**14):
        found = list(structured_outputs._LARK.finditer(f"start: {text[1:]}"))
        assert len(found) == 1
    for compile_text in (compile_lark, compile_regex, lambda text: compile_choices([text])):
        with pytest.raises(UnusableGrammar, match="is too long"):
            compile_text('\\"' * 2**20)


def test_answers_with_too_many_states_together_go_on_with_states_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
):
    limits = LLParserLimits(max_lexer_states=2**11)
    monkeypatch.setattr(grammars_module, "find_limits", lambda: limits)
    tokenizer = load_tokenizer("embedded:target")
    grammars = Grammars(tokenizer, {tokenizer.eos_token_id}, len(tokenizer))
    grammar = compile_schema({"type": "string", "maxLength": 30_000})

    def follow(shaping: GrammarShaping, num_words: int) -> GrammarShaping:
        text = '"' * (not shaping._path) + "the banner " * num_words
        for token in tokenizer.encode(text, add_special_tokens=False):
            row = shaping.shape(torch.zeros(len(tokenizer)))
            assert row[token] == 0
            shaping.advance([token])
        return shaping

    first, beside = grammars.open(grammar), follow(grammars.open(grammar), 2)
    with pytest.raises(GrammarTooComplex):
        follow(first, 2000)
    assert first._renewed_at > 0
    follow(beside, 20)
    for _ in range(30):  # of which each is as long as none was before
        shaping = follow(grammars.open(grammar), 12)
        shaping.roll_back(5)
        follow(shaping, 2)


def test_few_beginnings_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammars_module, "_MOST_COMPILED", 2)
    text = ChatText.load("embedded:target")
    grammars = Grammars(load_tokenizer("embedded:target"), text.eos_ids, 1024)
    one, two, three = (compile_regex(each) for each in ("a+", "b+", "c+"))
    for each in (one, two, one, three):
        grammars.open(each)
    assert [*grammars._compiled] == [one, three]


def test_what_is_compiled_at_the_door_is_followed_or_refused():
    """All generated schemas; the engine's first mask has no other limits."""
    text = ChatText.load("embedded:target")
    grammars = Grammars(load_tokenizer("embedded:target"), text.eos_ids, 1024)
    num_refused = 0
    for number in range(NUM_SCHEMAS):
        grammars.open(compile_schema(make_schema(random.Random(number))))
        try:
            compile_schema(make_unusable(random.Random(number))[0])
        except UnusableGrammar:
            num_refused += 1
    assert num_refused == NUM_SCHEMAS


def test_alternatives_that_lead_to_one_are_looked_at_once():
    """In as many ways as 2 to the power of 40; each is looked at a few times."""
    parts: dict[str, Any] = {
        f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(14)
    }
    parts["d14"] = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    wide = {"anyOf": [{"$ref": "#/$defs/d0"}] * 2}
    schema = {"type": "object", "properties": {"x": wide}, "$defs": parts}
    assert find_kinds(json.dumps(schema)) == {"x": frozenset({"string", "integer"})}
    assert QWEN_CODER.tags is not None
    assert write_rules(0, schema, QWEN_CODER.tags, {})
    circle = schema | {"$defs": parts | {"d14": {"$ref": "#/$defs/d0"}}}
    with pytest.raises((UnusableGrammar, BadRequest)):
        write_rules(0, circle, QWEN_CODER.tags, {})
