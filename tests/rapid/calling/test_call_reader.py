"""Calls come out of texts of every form, however these are cut; what is no call stays text."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.calling import call_reader
from rapid.calling.call_forms import (
    GLM,
    GPT_OSS,
    HERMES,
    LLAMA,
    MISTRAL,
    NEW_MISTRAL,
    QWEN_CODER,
    CallForm,
)
from rapid.calling.tagged_reader import open_reader
from rapid.chat_messages import Tool, ToolCall

FORMS = [HERMES, LLAMA, MISTRAL, NEW_MISTRAL, QWEN_CODER, GLM, GPT_OSS]
NAMES = ["look_up", "f"]
TEXTS = {"text": {"type": "string"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
TYPED = {"n": {"type": "integer"}, "x": {"type": "number"}, "yes": {"type": "boolean"}}
TYPED |= {"list": {"type": "array"}, "kind": {"enum": ["1", 1]}, "deep": {"$ref": "#/$defs/deep"}}
SCHEMA = {"properties": TEXTS | TYPED, "$defs": {"deep": {"type": "object"}}}
TOOLS = [Tool("look_up", "{}"), Tool("f", json.dumps(SCHEMA))]
ARGUMENTS = ['{"a": "x}\\"]</tool_call>"}', "{}", '{"b": [{"c": 1}], "d": "é\\\\"}']
CALLS = [ToolCall("", name, each) for name, each in zip([*NAMES, "f"], ARGUMENTS, strict=True)]

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"

Told = tuple[str, list[tuple[str, str]]]


def read(form: CallForm, text: str, cuts: list[int] | None = None) -> Told:
    """Return the text and the calls, from pushes that begin at `cuts`."""
    reader = open_reader(form, TOOLS)
    places = [0, *sorted(cuts or range(len(text))), len(text)]
    pieces = [piece for start, stop in pairwise(places) for piece in reader.push(text[start:stop])]
    said, calls = "", list[tuple[str, str]]()
    for piece in [*pieces, *reader.finish()]:
        if isinstance(piece, str):
            said += piece
        elif piece.begins:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    assert reader.num_calls == len(calls)
    return said, calls


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.opening + form.head)
@pytest.mark.parametrize("num_calls", [1, 2, 3])
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=40, deadline=None)
def test_what_a_form_writes_is_read(form: CallForm, num_calls: int, cuts: list[int]):
    calls = CALLS[: 1 if form.is_single else num_calls]
    before = "Let me look.\n\n" if form.opening else ""
    text = before + form.write(calls)
    told = "Let me look." if before else "", [(call.name, call.arguments) for call in calls]
    assert read(form, text, [cut % len(text) for cut in cuts]) == told
    assert read(form, text + "\n") == told


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (HERMES, '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', [("f", '{"a":1}')]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
        (LLAMA, '{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")]),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}]', [("f", "{}")]),
        (NEW_MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
        (NEW_MISTRAL, '[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}')]),
        (GPT_OSS, " to=functions.f<|channel|>commentary json<|message|> {}", [("f", "{}")]),
        (GPT_OSS, f"{THOUGHT}<|channel|>analysis to=functions.f<|message|>{{}}", [("f", "{}")]),
    ],
)
def test_what_models_write_instead_is_read_too(form: CallForm, text: str, calls: Told):
    assert read(form, text) == ("", calls)
    assert read(form, text, [len(text)]) == ("", calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "Hello, <tool"),
        (HERMES, "a <tool_call>\nno object</tool_call> b"),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"nome": "f"}'),
        (HERMES, '<tool_call>\n{"name": "f", "arg'),
        (HERMES, '<tool_call>{"name": ["f"]}</tool_call>'),
        (HERMES, "  spaces \n stay  "),
        (HERMES, '<tool_call>{"id":' + "[" * 3000),
        (HERMES, '<tool_call>{"id":' + "[" * 3000 + "]" * 3000 + "}"),
        (HERMES, '<tool_call>{"name": "' + "f" * 400 + '", "arguments": {}}'),
        (HERMES, "<tool_call>" + " " * 300 + '{"name": "f", "arguments": {}}'),
        (HERMES, '<tool_call>{"id": "}", "name": 1] {"name": "f"}'),
        (NEW_MISTRAL, "[TOOL_CALLS]" + "[CALL_ID" * 60),
        (MISTRAL, '[TOOL_CALLS] [{"type": "function"}]'),
        (LLAMA, '{"id":' + "[" * 3000),
        (LLAMA, '{"answer": {"name": "f", "parameters": {}}}'),
        (LLAMA, '{"name": "Ada", "parameters": {}} was she.'),
        (LLAMA, '<|python_tag|>brave_search.call(query="a")'),
        (LLAMA, '<|python_tag|>  {"n'),
        (LLAMA, 'It is {"name": "f", "parameters": {}}'),
        (LLAMA, "<|py"),
        (MISTRAL, "[TOOL_CALLS] none"),
        (NEW_MISTRAL, "[TOOL_CALLS]g[ARGS]{}"),
        (NEW_MISTRAL, "[TOOL_CALLS]f, then"),
        (GPT_OSS, "Hello, <|cha"),
        (GPT_OSS, "  spaces \n stay  "),
        (GPT_OSS, "<|channel|>commentary to=functions.g<|message|>{}"),
        (GPT_OSS, "<|channel|>commentary to=functions.f<|message|>none"),
        (GPT_OSS, f"<|channel|>{'no head ' * 99}"),
    ],
)
def test_what_only_looks_like_a_call_is_text_and_whole(form: CallForm, text: str):
    assert read(form, text) == (text, [])
    assert read(form, text, [len(text)]) == (text, [])


@pytest.mark.parametrize("num_items", [9, 2000])
def test_a_call_in_another_order_is_parsed_when_its_end_has_come(
    num_items: int, monkeypatch: pytest.MonkeyPatch
):
    tried = list[int]()
    read_object = call_reader._read_object
    monkeypatch.setattr(
        call_reader, "_read_object", lambda text: tried.append(len(text)) or read_object(text)
    )
    arguments = json.dumps({"a": ["}", "\\", '"', {"b": {}}] * num_items})
    call = f'{{"id": "1", "arguments": {arguments}, "name": "f"}}'
    assert read(HERMES, f"<tool_call>{call}</tool_call>") == ("", [("f", arguments)])
    assert tried == [len(call)]
    mistral = f'[TOOL_CALLS] [{call}, {{"name": "f", "arguments": {{}}}}, {call}]'
    assert read(MISTRAL, mistral)[1] == [("f", arguments), ("f", "{}"), ("f", arguments)]
    assert len(tried) == 3


def test_a_head_that_does_not_end_is_read_but_once(monkeypatch: pytest.MonkeyPatch):
    """What is looked at again at each push has a bounded length."""
    looked = list[int]()

    class Looking:
        def __init__(self, pattern: re.Pattern[str]) -> None:
            self.pattern = pattern

        def match(self, text: str) -> re.Match[str] | None:
            looked.append(len(text))
            return self.pattern.match(text)

    for name in ("_HEAD", "_FIRST_KEY", "_NAMED_HEAD", "_NO_NAMED_HEAD"):
        monkeypatch.setattr(call_reader, name, Looking(getattr(call_reader, name)))
    for form, text in (
        (HERMES, '<tool_call>{"id": ["' + "a, " * 2000),
        (LLAMA, '{"id": "' + "a" * 4000),
        (NEW_MISTRAL, "[TOOL_CALLS]" + "f" * 4000),
    ):
        looked.clear()
        assert read(form, text) == (text, [])
        assert 0 < max(looked) <= call_reader.MOST_HEAD
    long_name = "<tool_call>\n<function=f>\n<parameter=" + "a" * 4000
    assert read(QWEN_CODER, long_name)[1] == [("f", "{}")]


def test_text_behind_calls_and_calls_that_are_cut():
    call = HERMES.write(CALLS[:1])
    assert read(HERMES, f"{call}\nDone.") == ("\nDone.", [("look_up", ARGUMENTS[0])])
    assert read(HERMES, call[:55]) == ("", [("look_up", call[call.index('{"a"') : 55])])
    assert read(HERMES, call[:-4]) == ("", [("look_up", ARGUMENTS[0])])
    assert read(MISTRAL, MISTRAL.write(CALLS[:1])[:-1] + ", x") == (
        ", x",
        [("look_up", ARGUMENTS[0])],
    )
    assert all(isinstance(json.loads(each), dict) for each in ARGUMENTS)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.opening + form.head)
@pytest.mark.parametrize(
    "behind", [" trailing words", "\n\nDone.", "\n</tol_call>", " \n, no", "\n"]
)
@given(cuts=st.lists(st.integers(0, 200), min_size=1, max_size=12))
@settings(max_examples=20, deadline=None)
def test_white_space_behind_calls_is_of_the_text_that_follows(
    form: CallForm, behind: str, cuts: list[int]
):
    text = form.write(CALLS[:1]) + behind
    whole = read(form, text, [len(text)])
    assert read(form, text, [cut % len(text) for cut in cuts]) == whole == read(form, text)
    said = behind.lstrip() if form.is_in_channels else behind
    assert whole == (said.rstrip() and said, [("look_up", ARGUMENTS[0])])


@pytest.mark.parametrize("space", [" ", "\n ", "\u2028"])
@pytest.mark.parametrize("head", ["f%s[ARGS]%s", "f[ARGS]%s%s", "f[CALL_ID]abc[ARGS]%s%s"])
def test_white_space_within_a_head_is_of_the_call(head: str, space: str):
    text = f"[TOOL_CALLS]{head % (space, space)}{{}}"
    assert read(NEW_MISTRAL, text) == read(NEW_MISTRAL, text, [len(text)]) == ("", [("f", "{}")])


def test_messages_to_the_user_are_one_text_and_a_head_that_is_cut_is_none():
    begun = "<|channel|>commentary<|message|>Let me look. <|end|><|start|>assistant"
    call = GPT_OSS.write(CALLS[:1])
    assert read(GPT_OSS, begun + call) == ("Let me look.", [("look_up", ARGUMENTS[0])])
    for rest in ("", "<|channel|>comm", "<|channel|>commentary to=functions.f<|message|>"):
        assert read(GPT_OSS, begun + rest) == ("Let me look.", [])
    said = f"{begun}{THOUGHT}<|channel|>final<|message|>It is."
    assert read(GPT_OSS, said) == ("Let me look.\n\nIt is.", [])
    assert read(GPT_OSS, call[:-3]) == ("", [("look_up", ARGUMENTS[0][:-3])])


WRITTEN = {
    "qwen": (
        QWEN_CODER,
        "<tool_call>\n<function=f>\n%s</function>\n</tool_call>",
        "<parameter=%s>\n%s\n</parameter>\n",
    ),
    "qwen, tight": (
        QWEN_CODER,
        "<tool_call><function=f>%s</function></tool_call>",
        "<parameter=%s>%s</parameter>",
    ),
    "qwen, open": (
        QWEN_CODER,
        "<tool_call><function=f>%s</tool_call>",
        "<parameter=%s>%s</parameter>",
    ),
    "glm": (
        GLM,
        "<tool_call>f\n%s</tool_call>",
        "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n",
    ),
    "glm, tight": (
        GLM,
        "<tool_call>f%s</tool_call>",
        "<arg_key>%s</arg_key><arg_value>%s</arg_value>",
    ),
}


@pytest.mark.parametrize("way", WRITTEN)
@given(cuts=st.lists(st.integers(0, 900), max_size=12))
@settings(max_examples=40, deadline=None)
def test_values_between_tags_are_of_the_types_of_the_schema(way: str, cuts: list[int]):
    form, call, argument = WRITTEN[way]
    values = [
        ("text", 'a "b"\n  </param\\> 1', 'a "b"\n  </param\\> 1'),
        ("text2", "true", True),
        ("note", "null", None),
        ("n", "7", 7),
        ("x", "7", 7),
        ("yes", "True", True),
        ("list", '[1, "a"]', [1, "a"]),
        ("kind", "1", 1),
        ("deep", '{"a": {"b": null}}', {"a": {"b": None}}),
        ("other", "[1", "[1"),
        ("other2", '{"a": 1}', {"a": 1}),
    ]
    text = "Well.\n" + call % "".join(argument % (name, said) for name, said, _ in values)
    said, calls = read(form, text, [cut % len(text) for cut in cuts])
    assert said == "Well."
    ((name, arguments),) = calls
    assert name == "f"
    assert json.loads(arguments) == {name: value for name, _, value in values}
    text = call % (argument % ("text", "7")) + "\n" + call % (argument % ("n", "seven"))
    assert read(form, text)[1] == [("f", '{"text": "7"}'), ("f", '{"n": "seven"}')]
    assert read(form, call % "") == ("", [("f", "{}")])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (QWEN_CODER, "<tool_call>\n<function=g>\n</function>\n</tool_call>"),
        (QWEN_CODER, "<tool_call>\n<function"),
        (QWEN_CODER, "<tool_call>\n<fun></tool_call>"),
        (GLM, "<tool_call>g\n</tool_call>"),
        (GLM, "<tool_call>no such, no</tool_call>"),
        (GLM, "a <tool_call>f"),
        (GLM, f"<tool_call>{'f' * 400}\n"),
        (QWEN_CODER, f"<tool_call>\n<function={'f' * 400}>"),
    ],
)
def test_what_only_looks_like_a_tagged_call_is_text(form: CallForm, text: str):
    assert read(form, text) == (text, [])


def test_of_a_tagged_call_that_is_cut_what_was_said_stays():
    text = "<tool_call>\n<function=f>\n<parameter=text>\nHello\n</par"
    assert read(QWEN_CODER, text) == ("", [("f", '{"text": "Hello\\n</par')])
    assert read(QWEN_CODER, text[:30]) == ("", [("f", "")])
    text = "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>12"
    assert read(GLM, text) == ("", [("f", '{"n": ')])
