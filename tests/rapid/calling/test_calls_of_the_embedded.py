"""The embedded models call tools, whether they understand them or not: the grammar makes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import rapid
from rapid.answering.request import RequestRun
from rapid.answering.run import Run
from rapid.chat_messages import (
    Message,
    Tool,
    ToolCall,
    Tools,
)
from rapid.errors import BadRequest
from rapid.events import CallDelta, ChoiceDelta, Finished, GenerationEvent, TextDelta
from rapid.messages import GenerateRequest, SpeculationRequest

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "year": {"enum": [1871, 1900]}},
    "required": ["name", "year"],
    "additionalProperties": False,
}
TOOLS = Tools(
    (Tool("look_up", json.dumps(SCHEMA), "Looks up a keeper."), Tool("ring", "{}")),
    must_call=True,
    only="look_up",
    is_parallel=False,
)
TEXT = "The lighthouse of Varo guards the strait since 1871. It was built by Rowe. "
REQUEST = GenerateRequest(
    "1",
    "a",
    (Message("user", "Who built the lighthouse?"),),
    (rapid.Document("isle", TEXT * 4),),
    temperature=1.0,
    seed=7,
    max_tokens=120,
    tools=TOOLS,
    is_streamed=True,
)


@pytest.fixture(scope="module")
def pair() -> Any:
    with rapid.open("embedded:target", drafter="embedded:drafter") as opened:
        yield opened


@pytest.mark.parametrize("is_strict", [False, True])
def test_strict_tools_are_refused_where_vllm_drafts(pair: Any, is_strict: bool):
    tools = Tools((Tool("look_up", json.dumps(SCHEMA), is_strict=is_strict),))
    services = replace(pair._services, pools=replace(pair._services.pools, vllm_drafts=True))

    def plan(mode: Any) -> Any:
        speculation = SpeculationRequest(mode=mode, coupling="maximal")
        return Run(services, replace(REQUEST, tools=tools, speculation=speculation)).plan

    assert plan("plain").sampling.grammar is not None
    if is_strict:
        with pytest.raises(BadRequest, match="strict tools"):
            plan("lossless")
    else:
        assert plan("lossless").sampling.grammar is None


def ask(pair: Any, request: GenerateRequest) -> list[GenerationEvent]:
    async def run() -> list[GenerationEvent]:
        return [event async for event in RequestRun(pair._services, request).events()]

    return pair._loop.run(run)


def arguments(events: Sequence[GenerationEvent], choice: int = 0) -> str:
    deltas = [each for each in events if isinstance(each, CallDelta) and each.choice == choice]
    assert [each.begins for each in deltas] == [True] + [False] * (len(deltas) - 1)
    assert {(each.index, each.name) for each in deltas} == {(0, "look_up")}
    assert len({each.id for each in deltas}) == 1
    return "".join(each.arguments for each in deltas)


@pytest.mark.parametrize("mode", ["plain", "lossless", "fused", "rag"])
def test_a_call_that_must_be_is_made_in_every_mode(pair: Any, mode: Any):
    request = replace(REQUEST, num_choices=2, speculation=SpeculationRequest(mode=mode))
    events = ask(pair, request)
    for choice in (0, 1):
        told = json.loads(arguments(events, choice))
        assert list(told) == ["name", "year"]
        assert told["year"] in (1871, 1900)
    texts = [each for each in events if isinstance(each, TextDelta)]
    assert [each.finish_reason for each in texts if each.finish_reason] == ["tool_calls"] * 2
    assert "".join(each.text for each in texts) == ""
    finished = events[-1]
    assert isinstance(finished, Finished)
    counted = sum(each.completion_tokens for each in finished.receipt.choices)
    assert sum(each.num_tokens for each in events if isinstance(each, ChoiceDelta)) == counted


def test_a_seeded_call_is_that_of_plain(pair: Any):
    plain = replace(REQUEST, speculation=SpeculationRequest(mode="plain"), drawn_seed=3)
    lossless = replace(plain, speculation=SpeculationRequest(mode="lossless"))
    said = [[e for e in ask(pair, each) if isinstance(e, CallDelta)] for each in (plain, lossless)]
    assert arguments(said[0]) == arguments(said[1])
    assert said[0][0].id == said[1][0].id  # by which a client knows a continued call


def test_a_history_of_calls_is_read_and_text_is_answered(pair: Any):
    history = (
        Message("user", "Who built the lighthouse?"),
        Message("assistant", "", (ToolCall("c", "look_up", '{"name": "Varo", "year": 1871}'),)),
        Message("tool", "Rowe", tool_call_id="c"),
    )
    free = replace(TOOLS, must_call=False, only=None)
    request = replace(REQUEST, messages=history, tools=free, temperature=0.0, max_tokens=20)
    deltas = [each for each in ask(pair, request) if isinstance(each, ChoiceDelta)]
    assert all(isinstance(each, TextDelta) for each in deltas)
    assert "".join(each.text for each in deltas if isinstance(each, TextDelta))


def test_a_long_result_is_searched_for_the_drafter_and_read_by_the_target(pair: Any):
    page = "\n".join(f"The harbor of Bakeno number {each} is Zeru." for each in range(60))
    history = (
        Message("user", "What is the harbor of Bakeno number 7?"),
        Message("assistant", "", (ToolCall("c7", "ring", "{}"),)),
        Message("tool", page, tool_call_id="c7"),
    )
    request = replace(
        REQUEST,
        messages=history,
        documents=(),
        tools=replace(TOOLS, must_call=False, only=None),
        retrieval_tokens=64,
        explain=True,
        max_tokens=5,
        speculation=SpeculationRequest(mode="fused"),
    )
    (finished,) = (each for each in ask(pair, request) if isinstance(each, Finished))
    receipt = finished.receipt
    assert {each.document for each in receipt.chunks} == {"tool result c7"}
    assert receipt.explanation is not None
    text = pair._services.prompts.target
    read, drafted = (
        text.decode(each)
        for each in (
            receipt.explanation.target_prompt_ids,
            receipt.explanation.drafter_prompt_ids,
        )
    )
    assert page in read
    assert page not in drafted
    assert 'Retrieved text chunks of "tool result c7"' in drafted


def test_in_python_calls_are_of_the_answer_and_their_results_go_on(pair: Any):
    described = [each.describe() for each in TOOLS.tools]
    asked = [Message("user", "Who built the lighthouse?")]
    choice = {"type": "function", "function": {"name": "look_up"}}
    settings: Any = {"tools": described, "max_tokens": 120, "parallel_tool_calls": False}
    answer = pair.answer(asked, tool_choice=choice, **settings)
    (call,) = answer.tool_calls
    assert (answer.text, answer.finish_reason, call.name) == ("", "tool_calls", "look_up")
    assert json.loads(call.arguments)["year"] in (1871, 1900)
    asked.append(Message("assistant", answer.text, answer.tool_calls))
    result = Message("tool", "Rowe", tool_call_id=call.id)
    assert pair.answer([*asked, result], **settings | {"max_tokens": 5}).tool_calls == ()
    with pytest.raises(BadRequest, match=r"question\[1\].tool_calls\[0\] has no result") as refused:
        pair.answer(asked, **settings)
    assert refused.value.param == "question[1].tool_calls[0]"
