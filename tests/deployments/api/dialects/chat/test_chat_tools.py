"""Tools through OpenAI's SDK, over answers whose text has calls; and what is refused of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from deployments.api.dialects.chat.parsing import parse_question
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from rapid.answering.answers import GrowingAnswer, gather_deltas, merge_answers
from rapid.calling.call_reader import CallReader
from rapid.chat_messages import Message, ToolCall
from rapid.errors import BadRequest
from rapid.events import Finished, GenerationEvent
from rapid.messages import GenerateRequest, TokenLogprobs, Verdict
from tests.deployments.scripted import STARTED, Generator, receipt
from tests.rapid.calling.checkpoints_with_tools import text_of

USER = {"role": "user", "content": "Weather in Paris?"}


class Weather(BaseModel):
    """Says what the weather is."""

    city: str
    unit: Literal["C", "F"]


WEATHER: Any = openai.pydantic_function_tool(Weather, name="get_weather")
NOW: Any = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = ['{"city": "Paris", "unit": "C"}', "{}"]
CALLS = f"""<tool_call>
{{"name": "get_weather", "arguments": {ARGUMENTS[0]}}}
</tool_call>
<tool_call>
{{"name": "now", "arguments": {ARGUMENTS[1]}}}
</tool_call>"""


class Speaking(Generator):
    """Says texts token by token, three a round, one text for each choice in turn.

    At `lost_after` rounds of a stream its connection is lost.
    """

    def __init__(self, *texts: str) -> None:
        self.texts, self.requests = texts, list[GenerateRequest]()
        self.lost_after: int | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        self.requests.append(request)
        text = text_of("hermes")
        names = [each.name for each in request.tools.callable_ones] if request.tools else []
        answers = []
        for choice in range(request.num_choices):
            calls = CallReader(text.call_form, names) if request.tools else None
            seed = str(request.drawn_seed)
            answer = GrowingAnswer(choice, text, request.stop, 1000, calls, seed)
            said = self.texts[choice % len(self.texts)]
            answers.append(answer.follow(verdicts(choice, [*text.encode(said), *text.eos_ids])))

        async def events() -> AsyncGenerator[GenerationEvent]:
            async for delta in merge_answers(answers):
                yield delta
            yield Finished(receipt(request.num_choices))

        yield STARTED
        async for event in events() if request.is_streamed else gather_deltas(events()):
            yield event


async def verdicts(choice: int, ids: Sequence[int]) -> AsyncIterator[Verdict]:
    for start in range(0, len(ids), 3):
        tokens = tuple(ids[start : start + 3])
        logprobs = tuple(TokenLogprobs(each, -0.5) for each in tokens)
        is_last = start + 3 >= len(ids)
        yield Verdict("l", choice, start, tokens, 3, 3, is_last, logprobs)


def client(service: Speaking) -> openai.AsyncOpenAI:
    app = Ingress(service, ApiConfig(model="m"))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://127.0.0.1/v1", http_client=http, max_retries=0
    )


async def test_calls_come_back_and_their_results_go_on():
    service = Speaking(f"Let me look.\n{CALLS}")
    sdk = client(service)
    asked: list[Any] = [USER]
    whole = await sdk.chat.completions.create(model="m", messages=asked, tools=[WEATHER, NOW])
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    calls: Any = choice.message.tool_calls
    assert [(each.type, each.function.name) for each in calls] == [
        ("function", "get_weather"),
        ("function", "now"),
    ]
    assert [each.function.arguments for each in calls] == ARGUMENTS
    assert len({each.id for each in calls}) == 2
    asked.append(choice.message.model_dump())
    for call in calls:
        asked.append({"role": "tool", "tool_call_id": call.id, "content": "18 degrees"})
    service.texts = ("It is warm.",)
    whole = await sdk.chat.completions.create(model="m", messages=asked, tools=[WEATHER, NOW])
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (
        "It is warm.",
        "stop",
    )
    told = service.requests[-1].messages
    assert told[1] == Message(
        "assistant",
        "Let me look.",
        tuple(ToolCall(each.id, each.function.name, each.function.arguments) for each in calls),
    )
    assert [each.tool_call_id for each in told[2:]] == [each.id for each in calls]


async def test_a_call_without_text_has_null_content_and_its_logprobs():
    whole = await client(Speaking(CALLS, "No.")).chat.completions.create(
        model="m", messages=[USER], tools=[WEATHER, NOW], n=2, logprobs=True
    )
    called, said = whole.choices
    assert (called.message.content, said.message.content) == (None, "No.")
    assert (called.finish_reason, said.finish_reason) == ("tool_calls", "stop")
    assert said.message.tool_calls is None
    assert called.logprobs is not None
    assert "".join(each.token for each in called.logprobs.content or []) == CALLS


async def test_a_call_that_a_stop_string_cuts_is_none_to_make():
    whole = await client(Speaking(CALLS)).chat.completions.create(
        model="m", messages=[USER], tools=[WEATHER], stop=["Paris"]
    )
    (call,) = whole.choices[0].message.tool_calls or []
    assert (whole.choices[0].finish_reason, call.function.arguments) == ("stop", '{"city": "')  # type: ignore[union-attr]


@pytest.mark.parametrize("arguments", ['{"city": "Pa', "", "[]", '"Paris"', "{'city'"])
async def test_a_call_that_was_cut_can_be_sent_back(arguments: str):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    called: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    result: Any = {"role": "tool", "tool_call_id": "1", "content": "Your call was cut."}
    service = Speaking("It is warm.")
    whole = await client(service).chat.completions.create(
        model="m", messages=[USER, called, result], tools=[NOW]
    )
    assert whole.choices[0].message.content == "It is warm."
    (told,) = service.requests[-1].messages[1].tool_calls
    assert told.arguments == (arguments or "{}")


async def test_the_streams_helper_puts_calls_together():
    sdk = client(Speaking(f"Let me look.\n{CALLS}"))
    arguments = dict[int, str]()
    async with sdk.chat.completions.stream(model="m", messages=[USER], tools=[WEATHER]) as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments[event.index] = arguments.get(event.index, "") + event.arguments_delta
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert arguments == {0: ARGUMENTS[0]}
    assert call.function.parsed_arguments == Weather(city="Paris", unit="C")
    # `now` is none of this request's tools, so its call is text.
    assert '"now"' in (final.choices[0].message.content or "")


async def test_parse_has_the_arguments_as_a_model():
    parsed = await client(Speaking(CALLS.splitlines()[0] + CALLS[11:80])).chat.completions.parse(
        model="m", messages=[USER], tools=[WEATHER], tool_choice="required"
    )
    (call,) = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Paris", unit="C")


async def test_a_broken_stream_goes_on_in_the_middle_of_a_call():
    body = {"model": "m", "messages": [USER], "tools": [WEATHER, NOW], "stream": True}
    app = Ingress(Speaking(f"Let me look.\n{CALLS}"), ApiConfig(model="m"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:

        async def chunks(**headers: str) -> list[Any]:
            url = "http://127.0.0.1/v1/chat/completions"
            reply = await http.post(url, json=body, headers=headers)
            events = [each for each in reply.text.split("\n\n") if each.startswith("data: {")]
            return [json.loads(each[6:]) for each in events]

        whole = await chunks()
        assert len(whole) > 20
        for at, chunk in enumerate(whole[:-1]):
            rest = await chunks(**{"Last-Event-ID": chunk["rapid_event_id"]})
            again = [each["choices"][0]["delta"] for each in rest]
            assert again == [each["choices"][0]["delta"] for each in whole[at + 1 :]]


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "that of another tool"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "must be 'function'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "letters, digits",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters",
            "of type 'object'",
        ),
        (
            {"tools": [NOW | {"function": {"name": "a", "parameters": {"title": "\ud800"}}}]},
            "tools[0].function.parameters",
            "no lone surrogates",
        ),
        ({"tools": [NOW] * 129}, "tools", "at most 128"),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "must be 'none', 'auto'"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "names 'f', which is none",
        ),
        ({"tools": [NOW], "tool_choice": "required", "min_tokens": 5}, "min_tokens", "contradicts"),
        ({"tools": [WEATHER, NOW], "min_tokens": 5}, "min_tokens", "contradicts 'strict'"),
        ({"tools": [WEATHER], "ignore_eos": True}, "ignore_eos", "contradicts 'strict'"),
        ({"tools": [WEATHER], "bad_words": ["a"]}, "bad_words", "contradicts 'strict'"),
        ({"tools": [WEATHER], "allowed_token_ids": [1]}, "allowed_token_ids", "contradicts"),
    ],
)
def test_tools_that_cannot_be_are_refused_by_their_names(body: Any, param: str, why: str):
    with pytest.raises(BadRequest, match=why) as refused:
        parse(body)
    assert refused.value.param == param


@pytest.mark.parametrize("num_levels", [101, 600, 900])
@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {}])
def test_what_is_nested_too_deeply_is_refused_by_its_place(num_levels: int, more: Any):
    deep: dict[str, Any] = {}
    for _ in range(num_levels - 2):  # around which are two more
        deep = {"items": deep}
    function = {"name": "f", "parameters": {"properties": {"a": deep}}}
    with pytest.raises(BadRequest, match="nested too deeply: 100 levels at most") as refused:
        parse({"tools": [{"type": "function", "function": function}]} | more)
    assert refused.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("more", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_tools_without_grammars_contradict_nothing(more: Any):
    assert parse({"tools": [NOW], **more}).tools is not None
    assert parse({"tools": [WEATHER], "tool_choice": "none", **more}).tools is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "odd"}}])
def test_a_schema_that_cannot_be_enforced_is_refused_where_it_must_be(choice: Any):
    function = {"name": "odd", "parameters": {"not": {}}}
    with pytest.raises(BadRequest, match="a keyword that is not supported") as refused:
        parse({"tools": [NOW, {"type": "function", "function": function}], "tool_choice": choice})
    assert refused.value.param == "tools[1].function.parameters"
    with pytest.raises(BadRequest):
        parse({"tools": [{"type": "function", "function": function | {"strict": True}}]})
    assert parse({"tools": [{"type": "function", "function": function}]}).tools is not None


ARGUMENTS_OF = {"[": "[" * 100_000, "\\": '{"a": "\\ud800"}'}  # by the id of a call


@pytest.mark.parametrize(
    ("turns", "param", "why"),
    [
        ([{"role": "tool", "content": "a"}], "messages[1]", "must have a tool_call_id"),
        ([{"role": "user", "content": "a", "tool_call_id": "1"}], "messages[1]", "only then"),
        (
            [{"role": "tool", "content": "a", "tool_call_id": "1"}],
            "messages[1].tool_call_id",
            "the id of no call",
        ),
        (
            [{"role": "assistant", "tool_calls": "1"}],
            "messages[1].tool_calls[0]",
            "has no result",
        ),
        (
            [{"role": "assistant", "tool_calls": "1"}, USER],
            "messages[1].tool_calls[0]",
            "has no result",
        ),
        (
            [{"role": "assistant", "tool_calls": "11"}],
            "messages[1].tool_calls[1].id",
            "that of another call",
        ),
        (
            [{"role": "user", "content": "a", "tool_calls": "1"}],
            "messages[1]",
            "not 'assistant'",
        ),
        (
            [{"role": "assistant", "tool_calls": "["}],
            "messages[1].tool_calls[0].function.arguments",
            "nested too deeply",
        ),
        (
            [{"role": "assistant", "tool_calls": "\\"}],
            "messages[1].tool_calls[0].function.arguments",
            "no lone surrogates",
        ),
        ([{"role": "assistant", "content": None}], "messages[1].content", "must be a string"),
    ],
)
def test_a_history_that_makes_no_sense_is_refused_by_its_place(turns: Any, param: str, why: str):
    for turn in turns:
        if isinstance(ids := turn.get("tool_calls"), str):
            turn["tool_calls"] = [
                {
                    "id": each,
                    "type": "function",
                    "function": {"name": "f", "arguments": ARGUMENTS_OF.get(each, "{}")},
                }
                for each in ids
            ]
    with pytest.raises(BadRequest, match=why) as refused:
        parse({"messages": [USER, *turns]})
    assert refused.value.param == param


def parse(body: Any) -> GenerateRequest:
    whole = json.dumps({"model": "m", "messages": [USER]} | body).encode()
    return parse_question(whole, ApiConfig(model="m"), "1", "a")[1]


def test_what_asks_for_no_calls_has_no_tools():
    assert parse({"tools": [], "tool_choice": "auto"}).tools is None
    assert parse({"tools": [NOW], "tool_choice": "none"}).tools is None
    tools = parse({"tools": [NOW], "parallel_tool_calls": False}).tools
    assert tools is not None
    assert (tools.must_call, tools.is_parallel) == (False, False)


def test_a_refusal_is_what_the_assistant_said():
    turns = [{"role": "assistant", "content": None, "refusal": "No."}, USER]
    parts = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER]
    assert parse({"messages": [USER, *turns]}).messages[1].text == "No."
    assert parse({"messages": [USER, *parts]}).messages[1].text == "No."
