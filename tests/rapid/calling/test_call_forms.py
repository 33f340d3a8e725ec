"""Each family's template is recognised, and its grammar allows what it should and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from rapid.calling.call_forms import (
    GLM,
    GPT_OSS,
    HERMES,
    LLAMA,
    MISTRAL,
    NEW_MISTRAL,
    QWEN_CODER,
    compile_calls,
    find_form,
)
from rapid.chat_messages import Tool, ToolCall, Tools
from rapid.constraints.structured_outputs import compile_choices, compile_schema
from rapid.errors import BadRequest
from tests.rapid.calling.checkpoints_with_tools import TEMPLATES, text_of

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string"}},
}
TOOLS = Tools((Tool("get_weather", json.dumps(CITY)), Tool("now", "{}")))
WEATHER = ToolCall("", "get_weather", '{"city": "Paris"}')
NOW = ToolCall("", "now", "{}")
WRONG = ToolCall("", "get_weather", '{"town": "Paris"}')
UNKNOWN = ToolCall("", "get_time", "{}")
FAMILIES = ["hermes", "llama", "mistral", "new_mistral", "plain", "qwen_coder", "glm"]


@cache
def vocabulary(family: str) -> LLTokenizer:
    tokenizer = text_of(family).tokenizer
    serialized = tokenizer.backend_tokenizer.to_str()
    return LLTokenizer(serialized, n_vocab=len(tokenizer), eos_token=tokenizer.eos_token_id)


def is_allowed(family: str, grammar: str, answer: str) -> bool:
    matcher = LLMatcher(vocabulary(family), grammar)
    ids = text_of(family).encode(answer)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar_of(family: str, tools: Tools, given: str | None = None) -> str:
    text = text_of(family)
    return compile_calls(tools, text.call_form, text.call_tokens, given)


def test_forms_are_found_by_their_templates():
    found = {family: find_form(template) for family, template in TEMPLATES.items()}
    assert found == {
        "hermes": HERMES,
        "llama": LLAMA,
        "mistral": MISTRAL,
        "new_mistral": NEW_MISTRAL,
        "qwen_coder": QWEN_CODER,
        "glm": GLM,
        "gpt_oss": GPT_OSS,
        "plain": None,
    }
    assert find_form(TEMPLATES["hermes"] + "<function=") is None  # another language in the mark
    assert find_form("{{ tools }}<tool_call>name<arg>") is None
    assert find_form("{{ tools }}") is None


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_what_must_be_a_call_is_one(family: str):
    form = text_of(family).call_form
    grammar = grammar_of(family, replace(TOOLS, must_call=True))
    assert is_allowed(family, grammar, form.write([WEATHER]))
    assert is_allowed(family, grammar, form.write([NOW]))
    assert is_allowed(family, grammar, form.write([WEATHER, NOW])) != form.is_single
    for wrong in (
        "Hello",
        form.write([WRONG]),
        form.write([UNKNOWN]),
        form.write([WEATHER, WRONG]),
    ):
        assert not is_allowed(family, grammar, wrong)
    single = grammar_of(family, replace(TOOLS, must_call=True, is_parallel=False))
    assert is_allowed(family, single, form.write([WEATHER]))
    assert not is_allowed(family, single, form.write([WEATHER, NOW]))
    named = grammar_of(family, replace(TOOLS, must_call=True, only="now"))
    assert is_allowed(family, named, form.write([NOW]))
    assert not is_allowed(family, named, form.write([WEATHER]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_may_choose_writes_text_or_valid_calls(family: str):
    form = text_of(family).call_form
    grammar = grammar_of(family, TOOLS)
    before = "Let me look.\n\n" if form.opening else ""
    for right in ("Hello <b>\n{", '{"a": 1}', before + form.write([WEATHER])):
        assert is_allowed(family, grammar, right)
    for wrong in (WRONG, UNKNOWN):
        assert not is_allowed(family, grammar, before + form.write([wrong]))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_beside_calls_may_have_a_form(family: str):
    form, given = text_of(family).call_form, compile_schema({"type": "object"})
    if not form.opening:
        with pytest.raises(BadRequest, match="begin with a mark"):
            grammar_of(family, TOOLS, given)
        return
    grammar = grammar_of(family, TOOLS, given)
    assert is_allowed(family, grammar, '{"a":1}')
    assert is_allowed(family, grammar, form.write([WEATHER]))
    for wrong in ("Hello", form.write([WRONG])):
        assert not is_allowed(family, grammar, wrong)
    with pytest.raises(BadRequest, match="Only a JSON schema"):
        grammar_of(family, TOOLS, compile_choices(["a"]))
    must = replace(TOOLS, must_call=True)
    assert grammar_of(family, must, given) == grammar_of(family, must)


def test_arguments_that_cannot_be_enforced_are_any_object_or_refused():
    odd = Tool("odd", json.dumps({"not": {"type": "object"}}))
    form = HERMES
    told = form.write([ToolCall("", "odd", '{"a": 1}')])
    assert is_allowed("hermes", grammar_of("hermes", Tools((odd,))), told)
    for tools in (Tools((odd,), must_call=True), Tools((replace(odd, is_strict=True),))):
        with pytest.raises(BadRequest, match="cannot be followed"):
            grammar_of("hermes", tools)
    long = Tool("long", json.dumps({"properties": {"a": {"enum": ["x" * 40000]}}}))
    most = Tools(tuple(replace(long, name=f"{number:064}") for number in range(128)))
    last = form.write([ToolCall("", most.tools[-1].name, '{"a": 1}')])
    assert is_allowed("hermes", grammar_of("hermes", most), last)
    assert is_allowed(
        "hermes",
        grammar_of("hermes", Tools((long,))),
        form.write([ToolCall("", "long", "{}")]),
    )


TYPED = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "lines": {"type": "integer"},
        "mode": {"enum": ["fast", "slow"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["code", "lines"],
    "$defs": {"tag": {"type": "string"}},
}


@pytest.mark.parametrize("family", ["qwen_coder", "glm"])
def test_arguments_between_tags_follow_the_schema(family: str):
    form, run = text_of(family).call_form, Tool("run", json.dumps(TYPED))
    grammar = grammar_of(family, Tools((run,), must_call=True))

    def allows(**arguments: object) -> bool:
        return is_allowed(family, grammar, form.write([ToolCall("", "run", json.dumps(arguments))]))

    code = 'print("<b>\n")\n\n'
    assert allows(code=code, lines=3)
    assert allows(code="", lines=3, mode="slow", tags=["a", "b"])
    for wrong in (
        {"code": code},
        {"code": code, "lines": "three"},
        {"code": code, "lines": 3, "mode": "other"},
        {"code": code, "lines": 3, "tags": [1]},
        {"code": code, "lines": 3, "more": 1},
    ):
        assert not allows(**wrong)


@pytest.mark.parametrize("family", ["qwen_coder", "glm"])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "format": "email"}}},
        {"properties": {"a": {"type": "string", "pattern": "^x|y$"}}},
        {"properties": {"a": {"type": "string", "pattern": "(^x)"}}},
        {"properties": {"a": {"type": ["string", "null"], "maxLength": 3}}},
        {"properties": {"a": {"type": "string"}}, "additionalProperties": True},
        {"properties": {"a>": {"type": "string"}}},
        {"anyOf": [{"properties": {}}]},
        {"properties": {"a": {"not": {}}}},
        {"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ],
)
def test_what_cannot_be_enforced_between_tags_is_any_or_refused(family: str, schema: object):
    form, tool = text_of(family).call_form, Tool("f", json.dumps(schema))
    told = form.write([ToolCall("", "f", '{"a": "long text", "b": [1]}')])
    assert is_allowed(family, grammar_of(family, Tools((tool,))), told)
    with pytest.raises(BadRequest, match=r"^tools has a "):
        grammar_of(family, Tools((tool,), must_call=True))


@pytest.mark.parametrize("family", ["qwen_coder", "glm"])
@pytest.mark.parametrize(
    ("bounds", "right", "wrong"),
    [
        ({"maxLength": 3}, ["", "é\n<"], ["four"]),
        ({"minLength": 2, "maxLength": 1000}, ["</", "x" * 1000], ["", "x", "x" * 1001]),
        ({"pattern": "^[a-z]+/\\d$"}, ["ab/3"], ["ab/3\n", "/3", "ab/33", " ab/3"]),
        ({"pattern": "a/b|c"}, ["a/b", "-- c\n", "a c"], ["ab", ""]),
        ({"pattern": "^(a|b)", "minLength": 3}, ["axx", "b\nx"], ["ax", "xax"]),
        ({"format": "date"}, ["2026-01-31"], ["2026-13-31", "today", "2026-01-31\n"]),
        (
            {"format": "date-time"},
            ["2026-01-31T23:59:00.5Z"],
            ["2026-01-31T24:00:00Z"],
        ),
        ({"format": "uuid"}, ["6b1f0a52-0c4e-4f0b-9d3a-0123456789aB"], ["6b1f0a52"]),
        ({"pattern": "[$^]\\$$"}, ["$$", "x^$"], ["$", "$$ "]),
    ],
)
def test_a_text_between_tags_has_its_length_and_pattern(
    family: str, bounds: object, right: list[str], wrong: list[str]
):
    schema = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": bounds}}
    schema["$defs"]["a"]["type"] = "string"  # type: ignore[index]
    schema["required"] = ["a"]  # type: ignore[assignment]
    form, tool = text_of(family).call_form, Tool("f", json.dumps(schema))
    grammar = grammar_of(family, Tools((tool,), must_call=True))

    def allows(text: str) -> bool:
        told = form.write([ToolCall("", "f", json.dumps({"a": text}))])
        return is_allowed(family, grammar, told)

    assert [each for each in right if not allows(each)] == []
    assert [each for each in wrong if allows(each)] == []
    closing = "x</parameter>" if family == "qwen_coder" else "x</arg_value>"
    assert not allows(closing)


@pytest.mark.parametrize("family", ["qwen_coder", "glm"])
def test_an_object_without_properties_has_any(family: str):
    form, tools = text_of(family).call_form, Tools((Tool("f", '{"type": "object"}'),), True)
    for arguments in ("{}", '{"a": "b", "c": [1]}'):
        told = form.write([ToolCall("", "f", arguments)])
        assert is_allowed(family, grammar_of(family, tools), told)
