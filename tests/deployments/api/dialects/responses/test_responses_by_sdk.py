"""Responses through OpenAI's SDK, over a scripted orchestrator."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel

from deployments.api.dialects.responses.body.responses_request import _UNSUPPORTED, ResponsesRequest
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from rapid.chat_messages import ThinkingRequest
from rapid.errors import PromptTooLong, TargetUnavailable
from rapid.events import TOOL_CALLS, CallDelta, Finished, TextDelta, ThinkingDelta
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt

IN_CHATS = {"moderation", "service_tier", "temperature", "top_p"}  # which mean the same there
NEUTRAL = {  # for caches and clients of OpenAI, which change no answer
    "prompt_cache_options",
    "prompt_cache_retention",
    "stream_options",
}


def serve(*steps: Any) -> tuple[openai.AsyncOpenAI, ScriptedOrchestrator]:
    service = ScriptedOrchestrator(*steps)
    app = Ingress(service, ApiConfig(model="m"))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    base_url = "http://127.0.0.1/v1"
    client = openai.AsyncOpenAI(api_key="k", base_url=base_url, http_client=http, max_retries=0)
    return client, service


async def test_a_chat_may_be_shortened_and_the_receipt_names_what_was_left_out():
    said = replace(receipt(), left_out=(0, 1))
    client, service = serve(STARTED, TextDelta(0, "Yes.", (), "stop"), Finished(said))
    answer = await client.responses.create(model="m", input="Hi", truncation="auto")
    assert answer.truncation == "auto"
    assert answer.model_extra is not None
    assert answer.model_extra["rapid"]["left_out"] == [0, 1]
    whole = await client.responses.create(model="m", input="Hi")
    assert whole.truncation == "disabled"
    assert [sent.speculation.truncates for sent in service.requests] == [True, False]


async def test_a_text_is_answered_by_a_response():
    client, service = serve()
    answer = await client.responses.create(
        model="m", input="Hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    assert (answer.output_text, answer.status) == ("Hello, wörld!", "completed")
    assert answer.id.startswith("resp_")
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (100, 8)
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.model_extra is not None
    assert answer.model_extra["rapid"]["mode"] == "fused"
    assert answer.model_extra["store"] is False  # this server keeps none
    (sent,) = service.requests
    assert [(each.role, each.text) for each in sent.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert (sent.temperature, sent.is_streamed) == (0.5, False)


async def test_items_are_the_messages_of_a_chat():
    client, service = serve()
    first = await client.responses.create(model="m", input="Hi", max_output_tokens=9)
    content = [{"type": "input_text", "text": "And "}, {"type": "input_text", "text": "now?"}]
    await client.responses.create(
        model="m",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            *first.output,  # type: ignore[list-item]
            {"type": "message", "role": "user", "content": content},  # type: ignore[list-item]
        ],
        extra_body={"seed": 3, "unheard_of": 1, "rapid": {"mode": "plain"}},
    )
    sent = service.requests[1]
    assert [(each.role, each.text) for each in sent.messages] == [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello, wörld!"),
        ("user", "And now?"),
    ]
    assert sent.ignored == ("unheard_of",)
    assert (service.requests[0].max_tokens, sent.seed, sent.speculation.mode) == (9, 3, "plain")


async def test_a_stream_has_openais_events_in_their_order():
    client, _ = serve()
    stream = await client.responses.create(model="m", input="Hi", stream=True)
    events = [event async for event in stream]
    assert [each.type.removeprefix("response.") for each in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [each.sequence_number for each in events] == [*range(11)]
    done = events[-1].response  # type: ignore[union-attr]
    assert done.output_text == "Hello, wörld!"
    assert {each.item_id for each in events if hasattr(each, "item_id")} == {done.output[0].id}


async def test_the_stream_of_the_helper_ends_with_the_whole_response():
    client, _ = serve()
    async with client.responses.stream(
        model="m",
        input="Hi",
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    ) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_response()
    assert answer.output_text == "Hello, wörld!"
    (part,) = answer.output[0].content  # type: ignore[union-attr]
    assert part.logprobs is not None  # type: ignore[union-attr]
    assert [each.token for each in part.logprobs] == ["Hello", ", wörld", "!"]  # type: ignore[union-attr]
    assert [len(each.top_logprobs) for each in part.logprobs] == [2, 2, 2]  # type: ignore[union-attr]


class Door(BaseModel):
    code: int


async def test_an_answer_has_the_form_that_is_asked_for():
    said = (STARTED, TextDelta(0, '{"code":', ()), TextDelta(0, "7}", (), "stop"))
    client, service = serve(*said, Finished(receipt()))
    answer = await client.responses.parse(model="m", input="Which?", text_format=Door)
    assert answer.output_parsed == Door(code=7)
    assert service.requests[0].grammar
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(
            model="m",
            input="Which?",
            text={"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}},
        )
    assert refused.value.param == "text.format.schema"
    assert "text.format.schema" in refused.value.message


async def test_a_cut_answer_is_incomplete():
    client, _ = serve(STARTED, TextDelta(0, "Hel", (), "length"), Finished(receipt()))
    answer = await client.responses.create(model="m", input="Hi", max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = await client.responses.create(model="m", input="Hi", stream=True)
    assert [each.type async for each in stream][-1] == "response.incomplete"


async def test_a_failure_in_a_stream_is_its_last_event():
    client, _ = serve(STARTED, TextDelta(0, "Hel"), TargetUnavailable("Lost."))
    stream = await client.responses.create(model="m", input="Hi", stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.message == "Lost."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 1}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [1]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "a"}]}]},
            "input[0].content[0].file_data",
        ),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, "input[0].content"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "Hi", "temperature": "1"}, "temperature"),
        ({"input": "Hi", "background": True}, "background"),
        ({"input": "Hi", "background_options": {"completion_window": "2h"}}, "background_options"),
        ({"input": "Hi", "truncation": "left"}, "truncation"),
        ({"input": "Hi", "n": 2}, "n"),
        ({"input": "Hi", "include": ["x"]}, "include[0]"),
        ({"input": "Hi", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": "Hi", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "Hi", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "Hi", "tools": [{"type": "file_search"}]}, "tools[0].vector_store_ids"),
        ({"input": "Hi", "tool_choice": "some"}, "tool_choice"),
        ({"input": "Hi", "tool_choice": {"type": "file_search", "x": math.nan}}, "tool_choice"),
        ({"input": "Hi", "store": True}, "store"),
        ({"input": "Hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "Hi", "conversation": "c", "previous_response_id": "r"}, ""),
        ({"input": "Hi", "mode": "plain"}, "mode"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_its_name(body: dict[str, Any], param: str):
    client, service = serve()
    content = json.dumps({"model": "m", **body})
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post(
            "/responses",
            cast_to=object,
            content=content.encode(),
            options={"headers": {"content-type": "application/json"}},
        )
    assert (refused.value.param or "") == param
    assert param in refused.value.message
    assert service.requests == []


async def test_a_refusal_of_the_orchestrator_names_the_field_too():
    client, _ = serve(PromptTooLong("Too long.", "messages"))
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="m", input="Hi")
    assert refused.value.param == "input"


def test_every_field_of_openais_sdk_is_classified():
    """A new one must be honoured, refused or named above among those that change no answer."""
    known = {*ResponsesRequest.model_fields, *_UNSUPPORTED, *IN_CHATS, *NEUTRAL}
    assert ResponseCreateParamsBase.__annotations__.keys() - known == set()


WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALLS = (
    STARTED,
    TextDelta(0, "Let me see."),
    CallDelta(0, 0, "call_1", "weather", "", begins=True),
    CallDelta(0, 0, "call_1", "weather", '{"city":'),
    CallDelta(0, 0, "call_1", "weather", '"Oslo"}'),
    CallDelta(0, 1, "call_2", "weather", "{}", begins=True),
    TextDelta(0, "", (), TOOL_CALLS),
    Finished(receipt()),
)


async def test_calls_of_functions_are_items_and_their_results_too():
    client, service = serve(*CALLS)
    first = await client.responses.create(
        model="m",
        input="Rain?",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
    )
    text, *calls = first.output
    assert text.type == "message"
    assert [(each.type, each.call_id, each.arguments) for each in calls] == [  # type: ignore[union-attr]
        ("function_call", "call_1", '{"city":"Oslo"}'),
        ("function_call", "call_2", "{}"),
    ]
    results: Any = [
        {"type": "function_call_output", "call_id": f"call_{number}", "output": "Rain."}
        for number in (1, 2)
    ]
    await client.responses.create(
        model="m",
        input=[{"role": "user", "content": "Rain?"}, *first.output, *results],  # type: ignore[list-item]
        tools=[WEATHER],
    )
    asked, told = service.requests
    assert asked.tools is not None
    assert (asked.tools.must_call, asked.tools.only, asked.tools.is_parallel) == (
        True,
        "weather",
        False,
    )
    assert [each.role for each in told.messages] == ["user", "assistant", "tool", "tool"]
    assert [each.id for each in told.messages[1].tool_calls] == ["call_1", "call_2"]
    assert told.messages[3].tool_call_id == "call_2"


async def test_a_stream_tells_of_calls_in_openais_order():
    client, _ = serve(*CALLS)
    async with client.responses.stream(model="m", input="Rain?", tools=[WEATHER]) as stream:
        kinds = [each.type.removeprefix("response.") async for each in stream]
        answer = await stream.get_final_response()
    assert kinds[5:-1] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        *["function_call_arguments.delta"] * 2,
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [each.type for each in answer.output] == ["message", "function_call", "function_call"]


async def test_the_model_is_told_of_the_tools_that_are_allowed():
    client, service = serve()
    other: Any = {"type": "function", "name": "tides", "parameters": {"$ref": "#/none"}}
    named: Any = {"type": "function", "name": "weather"}
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    answer = await client.responses.create(
        model="m", input="Rain?", tools=[other, WEATHER], tool_choice=choice
    )
    (sent,) = service.requests
    assert sent.tools is not None
    assert ([each.name for each in sent.tools.tools], sent.tools.must_call) == (["weather"], True)
    assert answer.to_dict()["tool_choice"] == choice
    await client.responses.create(
        model="m", input="Rain?", tools=[WEATHER], tool_choice=choice | {"mode": "auto"}
    )
    assert service.requests[1].tools is not None
    assert not service.requests[1].tools.must_call


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"tools": [{"type": "function", "name": "tides"}]}, "tool_choice.tools[0]"),
        ({"tools": [{"type": "function", "name": []}]}, "tool_choice.tools[0]"),
        ({"tools": [{"type": "file_search"}]}, "tool_choice.tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tool_choice.tools[0]"),
        ({"tools": ["weather"]}, "tool_choice.tools"),
        ({}, "tool_choice.tools"),
        ({"tools": [], "mode": "none"}, "tool_choice.mode"),
        ({"tools": [], "mode": []}, "tool_choice.mode"),
        ({"tools": [], "mode": "required"}, "tool_choice.tools"),
    ],
)
async def test_what_is_allowed_must_be_among_the_tools(choice: Any, param: str):
    client, service = serve()
    choice |= {"type": "allowed_tools"}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="m", input="Rain?", tools=[WEATHER], tool_choice=choice)
    assert (refused.value.param, service.requests) == (param, [])


async def test_a_tool_that_cannot_be_called_is_refused_by_its_name():
    client, _ = serve()
    search: Any = {"type": "file_search", "vector_store_ids": ["vs_1"]}
    for tools, param in (
        ([search, WEATHER | {"name": "a b"}], "tools[1].name"),
        ([WEATHER, WEATHER], "tools[1].name"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input="Rain?", tools=tools)
        assert refused.value.param == param


async def test_the_object_has_all_that_open_responses_requires():
    """Its schema's required fields (openresponses.org), null or not."""
    client, _ = serve()
    fields = (
        "id object created_at completed_at status incomplete_details model previous_response_id "
        "instructions output error tools tool_choice truncation parallel_tool_calls text top_p "
        "presence_penalty frequency_penalty top_logprobs temperature reasoning usage "
        "max_output_tokens max_tool_calls store background service_tier metadata "
        "safety_identifier prompt_cache_key"
    )
    bare: Any = {"type": "function", "name": "weather"}
    form: Any = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    answer = await client.responses.create(
        model="m", input="Hi", tools=[bare], text={"format": form}, tool_choice="none"
    )
    told: Any = answer.to_dict()
    assert set(fields.split()) - told.keys() == set()
    whole = {"description": None, "parameters": None, "strict": False}
    assert told["tools"] == [bare | whole]
    assert told["text"]["format"] == form | {"description": None, "strict": False}
    assert told["output"][0].keys() >= {"type", "id", "status", "role", "content"}


THOUGHT = [STARTED, ThinkingDelta(0, "Hm, "), ThinkingDelta(0, "well."), TextDelta(0, "Yes")]
THOUGHT += [TextDelta(0, "", finish_reason="stop"), Finished(receipt())]


async def test_thinking_is_an_item_of_its_own_and_goes_back_before_its_message():
    client, service = serve(*THOUGHT)
    reasoning: Any = {"effort": "low", "summary": "auto", "max_tokens": 5}
    answer = await client.responses.create(model="m", input="Hi", reasoning=reasoning)
    thought, said = answer.output
    assert thought.type == "reasoning"
    assert (thought.summary, thought.status) == ([], "completed")
    assert [(each.type, each.text) for each in thought.content or []] == [
        ("reasoning_text", "Hm, well.")
    ]
    assert (said.type, answer.output_text) == ("message", "Yes")
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "low"
    assert service.requests[0].thinking == ThinkingRequest(is_on=True, budget=5)
    await client.responses.create(
        model="m", input=[*answer.output, {"role": "user", "content": "?"}]
    )  # type: ignore[list-item]
    assert [(each.text, each.thinking) for each in service.requests[1].messages] == [
        ("Yes", "Hm, well."),
        ("?", ""),
    ]


@pytest.mark.parametrize("shows", [True, False])
async def test_a_stream_tells_of_thinking_before_the_message(shows: bool):
    client, _ = serve(*THOUGHT)
    extra = {"include_reasoning": shows}
    async with client.responses.stream(model="m", input="Hi", extra_body=extra) as stream:
        events: list[Any] = [each async for each in stream]
        whole = await stream.get_final_response()
    kinds = [each.type for each in events if each.type.startswith("response.reasoning")]
    kind = "response.reasoning_text"
    assert kinds == [f"{kind}.delta", f"{kind}.delta", f"{kind}.done"] * shows
    assert [each.type for each in whole.output] == ["reasoning"] * shows + ["message"]
    assert [each.sequence_number for each in events] == [*range(len(events))]
