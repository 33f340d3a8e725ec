"""A gpt-oss answer from its tokens to its deltas, its grammar, and its chat in the history."""

from __future__ import annotations

import json
from datetime import date

import pytest

from rapid.answering.answers import GrowingAnswer, join_neighbours
from rapid.calling.tagged_reader import open_reader
from rapid.chat_messages import Message, Tool, ToolCall, Tools
from rapid.constraints.structured_outputs import compile_schema
from rapid.events import CallDelta, TextDelta, ThinkingDelta
from tests.rapid.answering.thinking.test_thinking_stream import rounds
from tests.rapid.calling.checkpoints_with_tools import text_of
from tests.rapid.calling.test_call_forms import grammar_of, is_allowed

TEXT = text_of("gpt_oss")
PAGE = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}
TOOLS = Tools((Tool("read", json.dumps(PAGE)), Tool("now", "{}")))
CALL = ToolCall("call_1", "read", '{"page": 7}')
ANALYSIS, COMMENTARY, FINAL = (
    f"<|channel|>{each}<|message|>" for each in ("analysis", "commentary", "final")
)
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_thinking_text_and_call_are_told_apart(size: int) -> None:
    said = f"{ANALYSIS}A page.{NEXT}{COMMENTARY}Let me look.{NEXT}{TEXT.call_form.write([CALL])}"
    calls = open_reader(TEXT.call_form, TOOLS.callable_ones)
    answer = GrowingAnswer(0, TEXT, (), 1000, calls, is_thinking=False)
    told = [each async for each in answer.follow(rounds(said, size, TEXT))]
    thought, text, *_ = join_neighbours(told)
    assert isinstance(thought, ThinkingDelta)
    assert isinstance(text, TextDelta)
    assert (thought.text, text.text) == ("A page.", "Let me look.")
    calls_told = [each for each in told if isinstance(each, CallDelta)]
    assert {each.name for each in calls_told} == {CALL.name}
    assert "".join(each.arguments for each in calls_told) == CALL.arguments
    last = [each for each in told if isinstance(each, TextDelta)][-1]
    assert last.finish_reason == "tool_calls"
    spelled = "".join(p.text for each in told if isinstance(each, TextDelta) for p in each.logprobs)
    assert spelled.startswith("Let me look.<|end|>")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("between", ["", f"{ANALYSIS}More.{NEXT}"])
async def test_a_text_without_calls_has_no_marks(size: int, between: str) -> None:
    said = f"{ANALYSIS}Hm.{NEXT}{between}{FINAL}It is so."
    answer = GrowingAnswer(0, TEXT, (), 1000, None, is_thinking=False)
    told = [each async for each in answer.follow(rounds(said, size, TEXT))]
    text = "".join(each.text for each in told if isinstance(each, TextDelta))
    spelled = "".join(p.text for each in told if isinstance(each, TextDelta) for p in each.logprobs)
    assert text == spelled == "It is so."
    thoughts = "".join(each.text for each in told if isinstance(each, ThinkingDelta))
    assert thoughts == ("Hm.More." if between else "Hm.")


def test_an_answer_thinks_speaks_and_ends_with_a_call_or_a_text() -> None:
    call, thoughts = TEXT.call_form.write([CALL]), f"{ANALYSIS}Hm.{NEXT}"
    grammar = grammar_of("gpt_oss", TOOLS)
    begun = ("", thoughts, f"{COMMENTARY}I look.{NEXT}", f"{thoughts}{COMMENTARY}I look.{NEXT}")
    for before in begun:
        assert is_allowed("gpt_oss", grammar, before + call)
        assert is_allowed("gpt_oss", grammar, f"{before}{FINAL}It is so.")
    for wrong in ("It is so.", call.replace("7", '"7"'), call.replace("read", "write")):
        assert not is_allowed("gpt_oss", grammar, wrong)
    must = grammar_of("gpt_oss", Tools(TOOLS.tools, must_call=True))
    assert is_allowed("gpt_oss", must, thoughts + call)
    assert not is_allowed("gpt_oss", must, f"{thoughts}{FINAL}It is so.")
    formed = grammar_of("gpt_oss", TOOLS, compile_schema({"type": "object"}))
    assert is_allowed("gpt_oss", formed, thoughts + FINAL + '{"a":1}')
    assert not is_allowed("gpt_oss", formed, thoughts + FINAL + "It is so.")


def test_calls_stand_in_the_history_one_by_one_before_their_results() -> None:
    now = ToolCall("call_2", "now", "{}")
    chat = [
        Message("user", "Page?"),
        Message("assistant", "I look.", (CALL, now), thinking="A page."),
        Message("tool", "Noon.", tool_call_id="call_2"),
        Message("tool", "An island.", tool_call_id="call_1"),
    ]
    ids = TEXT.encode_chat(chat, day=date(2026, 1, 31), tools=TOOLS.tools)
    rendered = TEXT.tokenizer.decode(ids)
    assert rendered[rendered.index("<|start|>user") :] == (
        "<|start|>user<|message|>Page?<|end|>"
        f"<|start|>assistant{ANALYSIS}A page.\n\nI look.<|end|>"
        "<|start|>assistant to=functions.read"
        '<|channel|>commentary json<|message|>{"page": 7}<|call|>'
        f'<|start|>functions.read to=assistant{COMMENTARY}"An island."<|end|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        f'<|start|>functions.now to=assistant{COMMENTARY}"Noon."<|end|>'
        "<|start|>assistant"
    )
