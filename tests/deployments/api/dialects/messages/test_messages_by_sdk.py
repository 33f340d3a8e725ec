"""Messages through Anthropic's SDK, over a scripted orchestrator."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase

from deployments.api.dialects.messages.messages_request import (
    _IGNORED,
    _UNSUPPORTED,
    MessagesRequest,
    read_messages,
)
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from rapid.chat_messages import ThinkingRequest
from rapid.errors import BadRequest, Overloaded, PromptTooLong, TargetUnavailable
from rapid.events import TOOL_CALLS, CallDelta, Finished, TextDelta, ThinkingDelta
from rapid.receipt import Citation, Citations
from tests.deployments.api.files.test_files_by_sdk import TEXT, World
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt

HI: Any = [{"role": "user", "content": "Hi"}]


def connect(app: Ingress, key: str = "sk-a") -> anthropic.AsyncAnthropic:
    http: Any = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    base_url = "http://127.0.0.1"
    return anthropic.AsyncAnthropic(api_key=key, base_url=base_url, http_client=http, max_retries=0)


def serve(*steps: Any) -> tuple[anthropic.AsyncAnthropic, ScriptedOrchestrator]:
    service = ScriptedOrchestrator(*steps)
    keys = [ApiKey(tenant="a", sha256=hash_key("sk-a"))]
    return connect(Ingress(service, ApiConfig(model="m", keys=keys))), service


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await (await world.access.get()).close()


async def test_messages_are_answered_by_a_message():
    client, service = serve()
    answer = await client.messages.create(
        model="m",
        max_tokens=9,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            *HI,
            {"role": "assistant", "content": "Ho"},
            {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        ],
        stop_sequences=["X"],
        metadata={"user_id": "u"},
        service_tier="standard_only",
        extra_body={"temperature": 0.5, "top_k": 3, "rapid": {"mode": "plain"}},
    )
    assert [(each.type, each.text) for each in answer.content] == [("text", "Hello, wörld!")]  # type: ignore[union-attr]
    assert (answer.role, answer.stop_reason, answer.model) == ("assistant", "end_turn", "m")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (100, 8)
    assert answer.model_extra is not None
    assert answer.model_extra["rapid"]["mode"] == "plain"
    (sent,) = service.requests
    assert [(each.role, each.text) for each in sent.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Ho"),
        ("user", "And now?"),
    ]
    assert sent.ignored == ("metadata", "service_tier", "system[].cache_control")
    assert (sent.max_tokens, sent.stop, sent.temperature, sent.top_k) == (9, ("X",), 0.5, 3)


async def test_a_stream_has_anthropics_events_in_their_order():
    client, _ = serve()
    async with client.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
        kinds = [each.type async for each in stream if each.type != "text"]
        answer = await stream.get_final_message()
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert answer.content[0].text == "Hello, wörld!"  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 8)


async def test_a_cut_answer_says_so():
    client, _ = serve(STARTED, TextDelta(0, "Hel", (), "length"), Finished(receipt()))
    answer = await client.messages.create(model="m", max_tokens=1, messages=HI)
    assert answer.stop_reason == "max_tokens"


async def test_an_answer_has_the_form_that_is_asked_for():
    client, service = serve()
    form: Any = {"type": "json_schema", "schema": {"type": "object"}}
    await client.messages.create(
        model="m", max_tokens=9, messages=HI, output_config={"format": form}
    )
    assert service.requests[0].grammar


def cite(*cited: Citation) -> list[Any]:
    said = replace(receipt(), citations=Citations(cited, (), "measured"))
    return [STARTED, TextDelta(0, "It is 7. Or 8.", (), "stop"), Finished(said)]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_citations_name_the_characters_of_a_document(is_streamed: bool):
    cited = Citation(0, 0, 8, "copied", "doors", None, 3, 9, "is 7..")
    other = Citation(0, 9, 14, "copied", "not attached", None, 0, 1, "x")
    client, service = serve(*cite(cited, other))
    source = {"type": "text", "media_type": "text/plain", "data": TEXT}
    documents = [
        {"type": "document", "source": source, "title": title, "citations": {"enabled": True}}
        for title in ("walls", "doors")
    ]
    content: Any = [*documents, {"type": "text", "text": "Which?"}]
    asked: Any = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": content}],
    }
    if is_streamed:
        async with client.messages.stream(**asked) as stream:
            answer: Any = await stream.get_final_message()
        assert [each.text for each in answer.content] == ["It is 7. Or 8."]
    else:
        answer = await client.messages.create(**asked)
        assert [each.text for each in answer.content] == ["It is 7.", " Or 8."]
        assert answer.content[1].citations is None
    (found,) = answer.content[0].citations
    assert (found.type, found.document_index, found.document_title) == ("char_location", 1, "doors")
    assert (found.start_char_index, found.end_char_index) == (3, 9)
    (sent,) = service.requests
    assert sent.citations
    assert [each.name for each in sent.documents] == ["walls", "doors"]


def attach(*titles: str) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": TEXT}
    content = [{"type": "document", "source": source, "title": title} for title in titles]
    turn = {"role": "user", "content": [*content, {"type": "text", "text": "Which?"}]}
    return {"model": "m", "max_tokens": 9, "messages": [turn]}


def test_documents_of_one_title_have_names_of_their_own():
    asked = read_messages(attach("a", "a", "a (2)", "a", "b"), ApiConfig(model="m"))
    assert asked.sources == ["a", "a (2)", "a (2) (2)", "a (3)", "b"]


def test_too_many_documents_are_refused_at_the_first_of_them():
    body = attach(*["a"] * 5)
    body["messages"][0]["content"].insert(3, None)  # which would be refused, if it came to that
    with pytest.raises(BadRequest, match="takes 2 documents at most") as refused:
        read_messages(body, ApiConfig(model="m", max_documents=2))
    assert refused.value.param == "messages[0].content[2]"


async def test_a_document_may_be_a_stored_file(world: World):
    file_id = await world.upload()
    await world.ingest()
    cited = Citation(0, 0, 8, "copied", "doors.txt", None, 0, 20, TEXT[:20])
    world.service.script = cite(cited)
    document = {
        "type": "document",
        "source": {"type": "file", "file_id": file_id},
        "citations": {"enabled": True},
    }
    messages: Any = [{"role": "user", "content": [document, {"type": "text", "text": "Which?"}]}]
    client = connect(world.app)
    answer: Any = await client.messages.create(model="m", max_tokens=9, messages=messages)
    (found,) = answer.content[0].citations
    assert (found.file_id, found.cited_text, found.document_index) == (file_id, TEXT[:20], 0)
    with pytest.raises(anthropic.NotFoundError) as refused:
        await connect(world.app, "sk-b").messages.create(model="m", max_tokens=9, messages=messages)
    assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"system": 1}, "system"),
        ({"temperature": 3}, "temperature"),
        (
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": [1]}},
            "tool_choice.type",
        ),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        (
            {"output_config": {"task_budget": {"type": "tokens", "total": 20_000}}},
            "output_config.task_budget",
        ),
        (
            {"tools": [{"name": "f", "input_schema": {}, "input_examples": [{"a": 1}]}]},
            "tools[0].input_examples",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": "no"}],
                    }
                ]
            },
            "messages[0].content[0].is_error",
        ),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_its_name(body: dict[str, Any], param: str):
    client, service = serve()
    content = json.dumps({"model": "m", "max_tokens": 9, "messages": HI} | body)
    headers = {"content-type": "application/json"}
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.post(
            "/v1/messages",
            cast_to=object,
            content=content.encode(),
            options={"headers": headers},
        )
    told: Any = refused.value.body
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["param"] == param
    assert param in told["error"]["message"]
    assert service.requests == []


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("Full."), 503, "overloaded_error"),
        (PromptTooLong("Long.", "messages"), 400, "invalid_request_error"),
        (ZeroDivisionError(), 500, "api_error"),
    ],
)
async def test_a_failure_has_anthropics_form(error: Exception, status: int, kind: str):
    client, _ = serve(error)
    with pytest.raises(anthropic.APIStatusError) as refused:
        await client.messages.create(model="m", max_tokens=9, messages=HI)
    told: Any = refused.value.body
    assert (refused.value.status_code, told["error"]["type"]) == (status, kind)


async def test_a_failure_in_a_stream_is_its_last_event():
    client, _ = serve(STARTED, TextDelta(0, "Hel"), TargetUnavailable("Lost."))
    async with client.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
        with pytest.raises(anthropic.APIStatusError, match=r"Lost\."):
            await stream.until_done()


async def test_a_wrong_key_is_refused():
    client, _ = serve()
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="sk-x").messages.create(
            model="m", max_tokens=9, messages=HI
        )


def test_every_field_of_anthropics_sdk_is_classified():
    """A new one must be honoured, refused or ignored by decision."""
    in_chats = {"temperature", "top_k", "top_p"}
    known = {*MessagesRequest.model_fields, *_UNSUPPORTED, *_IGNORED, *in_chats}
    assert MessageCreateParamsBase.__annotations__.keys() - known == set()


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_tool_is_used_and_its_result_read(is_streamed: bool):
    client, service = serve(
        STARTED,
        TextDelta(0, "Let me see."),
        CallDelta(0, 0, "call_1", "weather", '{"city":', begins=True),
        CallDelta(0, 0, "call_1", "weather", '"Oslo"}'),
        TextDelta(0, "", (), TOOL_CALLS),
        Finished(receipt()),
    )
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    asked: Any = {"model": "m", "max_tokens": 9, "messages": HI, "tools": [tool]}
    asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    if is_streamed:
        async with client.messages.stream(**asked) as stream:
            answer: Any = await stream.get_final_message()
    else:
        answer = await client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    text, use = answer.content
    assert (text.text, use.name, use.input) == ("Let me see.", "weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}
    turns = [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    await client.messages.create(**asked | {"messages": [*HI, *turns], "stream": False})
    first, second = service.requests
    assert first.tools is not None
    assert (first.tools.must_call, first.tools.is_parallel) == (True, False)
    assert [each.role for each in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[1].tool_calls[0].arguments == '{"city": "Oslo"}'


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"content": "No such city.", "is_error": True}, "The call failed.\nNo such city."),
        ({"is_error": True}, "The call failed.\n"),
        ({"content": "Rain.", "is_error": False, "toolset_name": "sky"}, "Rain."),
    ],
)
async def test_the_model_is_told_that_a_call_failed(given: Any, told: str):
    client, service = serve()
    use = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "cache_control": None} | given
    turns: Any = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tool: Any = {"name": "weather", "input_schema": {"type": "object"}, "defer_loading": True}
    answer: Any = await client.messages.create(
        model="m", max_tokens=9, messages=[*HI, *turns], tools=[tool]
    )
    (sent,) = service.requests
    assert sent.messages[-1].text == told
    named = ["messages[].content[].toolset_name"] if "toolset_name" in given else []
    assert list(sent.ignored) == [*named, "tools[].defer_loading"]
    assert answer.stop_reason == "end_turn"


async def test_a_tool_that_cannot_be_used_is_refused_by_its_name():
    client, _ = serve()
    tools: Any = [{"name": "weather", "input_schema": {"type": "string"}}]
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(model="m", max_tokens=9, messages=HI, tools=tools)
    assert refused.value.body["error"]["param"] == "tools[0].input_schema"  # type: ignore[index]


THOUGHT = [STARTED, ThinkingDelta(0, "Hm, "), ThinkingDelta(0, "well."), TextDelta(0, "Yes")]
THOUGHT += [TextDelta(0, "", finish_reason="stop"), Finished(receipt())]


async def test_thinking_is_a_block_and_goes_back_before_its_text():
    client, service = serve(*THOUGHT)
    thinking: Any = {"type": "enabled", "budget_tokens": 5}
    answer = await client.messages.create(model="m", max_tokens=9, messages=HI, thinking=thinking)
    thought, said = answer.content
    assert (thought.type, said.type) == ("thinking", "text")
    assert (thought.thinking, said.text) == ("Hm, well.", "Yes")  # type: ignore[union-attr]
    assert service.requests[0].thinking == ThinkingRequest(is_on=True, budget=5)
    asked: Any = [*HI, {"role": "assistant", "content": answer.content}, *HI]
    off: Any = {"type": "disabled"}
    effort: Any = {"effort": "low"}
    await client.messages.create(
        model="m", max_tokens=9, messages=asked, thinking=off, output_config=effort
    )
    sent = service.requests[1]
    assert [each.thinking for each in sent.messages] == ["", "Hm, well.", ""]
    assert sent.thinking == ThinkingRequest(is_on=False)


@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_a_stream_has_a_block_of_thinking_first(display: Any):
    client, service = serve(*THOUGHT)
    thinking: Any = {"type": "adaptive", "display": display}
    async with client.messages.stream(
        model="m",
        max_tokens=9,
        messages=HI,
        thinking=thinking,
        extra_body={"thinking_token_budget": 3},
    ) as stream:
        thoughts = [each.thinking async for each in stream if each.type == "thinking"]
        answer = await stream.get_final_message()
    assert service.requests[0].thinking == ThinkingRequest(is_on=True, budget=3)
    is_shown = display == "summarized"
    assert thoughts == ["Hm, ", "well."] * is_shown
    assert [each.type for each in answer.content] == ["thinking"] * is_shown + ["text"]
