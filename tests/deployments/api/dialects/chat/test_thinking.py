"""Thinking through OpenAI's SDK, over answers that begin with it; and the fields about it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from deployments.api.dialects.chat.parsing import parse_chat_request
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from rapid.answering.answers import GrowingAnswer, gather_deltas, merge_answers
from rapid.chat_messages import ThinkingRequest
from rapid.errors import BadRequest
from rapid.events import Finished, GenerationEvent
from rapid.messages import GenerateRequest
from rapid.receipt import ChoiceStatistics, Receipt
from tests.deployments.api.dialects.chat.test_chat_tools import verdicts
from tests.deployments.scripted import STARTED, Generator, receipt
from tests.rapid.calling.checkpoints_with_tools import text_of

USER: Any = {"role": "user", "content": "Is it far?"}
THOUGHT, SAID = "It may be é.\n\nOr not.", "No, it is near."


def receipt_of(answers: list[GrowingAnswer]) -> Receipt:
    choices: tuple[ChoiceStatistics, ...] = tuple(each.statistics.of_choice() for each in answers)
    return replace(receipt(len(answers)), choices=choices)


class Thinking(Generator):
    """Thinks, and answers, three tokens a round."""

    def __init__(self) -> None:
        self.requests = list[GenerateRequest]()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        self.requests.append(request)
        text = text_of("qwen")
        ids = [*text.encode(f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"), *text.eos_ids]
        answers = [
            GrowingAnswer(choice, text, request.stop, 1000, is_thinking=False)
            for choice in range(request.num_choices)
        ]
        told = [each.follow(verdicts(each.choice, ids)) for each in answers]

        async def events() -> AsyncGenerator[GenerationEvent]:
            async for delta in merge_answers(told):
                yield delta
            yield Finished(receipt_of(answers))

        yield STARTED
        async for event in events() if request.is_streamed else gather_deltas(events()):
            yield event


def client(service: Generator) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(Ingress(service, ApiConfig(model="m"))))
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://127.0.0.1/v1", http_client=http, max_retries=0
    )


async def test_thinking_stands_beside_the_answer_and_goes_back_into_the_chat() -> None:
    service = Thinking()
    sdk = client(service)
    whole = await sdk.chat.completions.create(
        model="m", messages=[USER], n=2, logprobs=True, reasoning_effort="low"
    )
    for choice in whole.choices:
        message: Any = choice.message
        assert (message.reasoning_content, message.reasoning) == (THOUGHT, THOUGHT)
        assert (message.content, choice.finish_reason) == (SAID, "stop")
        assert choice.logprobs is not None
        assert "".join(each.token for each in choice.logprobs.content or []) == SAID
    assert whole.usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens == whole.usage.completion_tokens - 2 * (len(SAID) + 1)
    assert service.requests[0].thinking == ThinkingRequest(is_on=True, share=0.2)
    said: Any = [USER, whole.choices[0].message.model_dump(), USER]
    await sdk.chat.completions.create(model="m", messages=said)
    assert service.requests[1].messages[1].thinking == THOUGHT


@pytest.mark.parametrize("shows", [True, False])
async def test_a_stream_thinks_before_it_answers(shows: bool) -> None:
    stream = await client(Thinking()).chat.completions.create(
        model="m", messages=[USER], stream=True, extra_body={"include_reasoning": shows}
    )
    deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream]
    thoughts = [getattr(each, "reasoning_content", None) or "" for each in deltas]
    assert "".join(thoughts) == (THOUGHT if shows else "")
    assert "".join(each.content or "" for each in deltas) == SAID
    assert [getattr(each, "reasoning", None) or "" for each in deltas] == thoughts
    last = max((n for n, each in enumerate(thoughts) if each), default=0)
    assert not any(each.content for each in deltas[: last + 1])


@pytest.mark.parametrize("shows", [True, False])
async def test_a_stream_that_breaks_goes_on_within_its_thinking(shows: bool) -> None:
    app = Ingress(Thinking(), ApiConfig(model="m"))
    body = {"model": "m", "messages": [USER], "stream": True, "seed": 1}
    body |= {"include_reasoning": shows}
    transport = httpx.ASGITransport(app)

    async def read(after: str | None) -> list[Any]:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            headers = {"Last-Event-ID": after} if after else {}
            told = await http.post("/v1/chat/completions", json=body, headers=headers)
        lines = [line.removeprefix("data: ") for line in told.text.splitlines() if line]
        return [json.loads(line) for line in lines[:-1]]

    def texts(chunks: list[Any]) -> tuple[str, str]:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        return (
            "".join(each.get("reasoning", "") for each in deltas),
            "".join(each.get("content", "") for each in deltas),
        )

    whole = await read(None)
    assert texts(whole) == (THOUGHT if shows else "", SAID)
    for place in range(len(whole)):
        rest = await read(whole[place]["rapid_event_id"])
        before, after = texts(whole[: place + 1]), texts(rest)
        assert (before[0] + after[0], before[1] + after[1]) == texts(whole)


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, ThinkingRequest()),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ThinkingRequest(is_on=False)),
        ({"chat_template_kwargs": {"thinking": True}}, ThinkingRequest(is_on=True)),
        ({"reasoning_effort": "none"}, ThinkingRequest(is_on=False)),
        ({"reasoning_effort": "high"}, ThinkingRequest(is_on=True, share=0.8)),
        ({"reasoning": {"effort": "low", "exclude": True}}, ThinkingRequest(is_on=True, share=0.2)),
        ({"reasoning": {"max_tokens": 9}}, ThinkingRequest(budget=9)),
        ({"reasoning": {"enabled": False}}, ThinkingRequest(is_on=False)),
        (
            {"reasoning_effort": "low", "thinking_token_budget": 5},
            ThinkingRequest(is_on=True, budget=5),
        ),
        ({"reasoning_budget_tokens": -1}, ThinkingRequest()),
        ({"reasoning_budget_tokens": 0}, ThinkingRequest(budget=0)),
        (
            {"thinking_token_budget": 0, "chat_template_kwargs": {"enable_thinking": False}},
            ThinkingRequest(is_on=False, budget=0),
        ),
    ],
    ids=str,
)
def test_every_name_for_it_arrives_as_one(fields: Any, thinking: ThinkingRequest) -> None:
    assert parse(fields).as_generate_request("r", "t").thinking == thinking


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        (
            {"chat_template_kwargs": {"enable_thinking": "no"}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": {"keep": True}}, "chat_template_kwargs.keep"),
        ({"reasoning": {"depth": 1}}, "reasoning.depth"),
        (
            {"reasoning_effort": "none", "reasoning": {"max_tokens": 5}},
            "reasoning.max_tokens",
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "reasoning_effort",
        ),
        (
            {"thinking_token_budget": 5, "reasoning_budget_tokens": 6},
            "reasoning_budget_tokens",
        ),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_by_its_name(fields: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(fields).as_generate_request("r", "t")
    assert refused.value.param == param


def test_a_refusal_by_the_model_names_the_field_that_was_sent() -> None:
    for fields, given, name in (
        ({"reasoning": {"max_tokens": 5}}, "thinking_token_budget", "reasoning.max_tokens"),
        ({"reasoning": {"enabled": True}}, "reasoning_effort", "reasoning.enabled"),
        (
            {"chat_template_kwargs": {"thinking": True}},
            "reasoning_effort",
            "chat_template_kwargs.thinking",
        ),
        ({}, "reasoning_effort", "reasoning_effort"),
    ):
        assert parse(fields).field_of(given) == name


def parse(fields: dict[str, Any]) -> Any:
    return parse_chat_request(json.dumps({"model": "m", "messages": [USER]} | fields).encode())
