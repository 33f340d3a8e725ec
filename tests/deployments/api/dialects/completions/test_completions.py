"""Text completions: what bodies ask, and what OpenAI's SDK and lm-evaluation-harness read."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest

from deployments.api.dialects.completions.completion_dialect import CompletionDialect
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from rapid.errors import BadRequest
from rapid.events import Finished, GenerationEvent, TextDelta, TokenText
from rapid.messages import GenerateRequest
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt, token_texts

CONFIG = ApiConfig(model="m", max_characters=2000, max_model_len=500)


async def parse(**fields: Any) -> GenerateRequest:
    body = json.dumps({"model": "m"} | fields).encode()
    return (await CompletionDialect().parse(body, CONFIG, "r", "t"))[1]


class Continuing(ScriptedOrchestrator):
    """Continues each prompt with its number, after the prompt itself where that is to be told."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        self.requests.append(request)
        yield STARTED
        for choice in range(request.num_answers):
            prompt = request.prompts[choice // request.num_choices]
            words = prompt.split(" ") if isinstance(prompt, str) else [f"w{i}" for i in prompt]
            if request.echoes_prompt:
                scored = tuple(
                    TokenText(word, -0.25 if index else math.nan, ((word, -0.25), ("x", -2.0)))
                    for index, word in enumerate(words)
                )
                logprobs = () if request.num_logprobs is None else scored
                yield TextDelta(choice, " ".join(words), logprobs)
            for said, finish in ((f" {choice}", None), ("!", "stop")):
                yield TextDelta(choice, said, token_texts(request, said), finish)
        yield Finished(receipt(request.num_answers))


def client(service: ScriptedOrchestrator) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(Ingress(service, CONFIG)))
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://127.0.0.1/v1", http_client=http, max_retries=0
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ("Hi",)),
        (["Hi", "Ho"], ("Hi", "Ho")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
async def test_prompts_have_four_forms(prompt: Any, prompts: Any) -> None:
    request = await parse(prompt=prompt)
    assert request.prompts == prompts
    assert request.messages == ()
    assert request.max_tokens == 16
    assert request.num_logprobs is None


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({}, "prompt", "is missing"),
        ({"prompt": None}, "prompt", "must be a text, a list of token ids"),
        ({"prompt": 5}, "prompt", "must be a text"),
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": [[]]}, "prompt", "is empty"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": [1, "a"]}, "prompt", "must be a text"),
        ({"prompt": [1, True]}, "prompt", "must be a text"),
        ({"prompt": [1, -1]}, "prompt", "must be a text"),
        ({"prompt": [1, 2**31]}, "prompt", "must be a text"),
        ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
        ({"prompt": ["a"] * 129}, "prompt", "must have 1 to 128 entries"),
        ({"prompt": ["a"] * 100, "n": 2}, "n", "must be at most 128"),
        ({"prompt": "a", "n": 9}, "n", "must be at most 8"),
        ({"prompt": "a" * 2001}, "prompt", "maximum context length is 500 tokens"),
        ({"prompt": "a", "best_of": 3}, "best_of", "is not supported"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "is not supported"),
        ({"prompt": "a", "guided_json": {}}, "guided_json", "is not supported"),
        ({"prompt": "a", "tools": [{}]}, "tools", "is not supported"),
        ({"prompt": "a", "messages": []}, "messages", "is not supported"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "must be a valid integer"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "needs stream"),
        ({"prompt": "a", "mode": "plain"}, "mode", "belongs into the object 'rapid'"),
        ({"prompt": "a", "rapid": {"mode": "fused"}}, "rapid.mode", "'lossless' or 'plain'"),
        ({"prompt": "a", "rapid": {"documents": []}}, "rapid.documents", "is not known"),
        ({"prompt": ["a", "b"], "rapid": {"explain": "tokens"}}, "rapid", "goes with one prompt"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    fields: dict[str, Any], param: str, why: str
) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        await parse(**fields)
    assert refused.value.param == param


async def test_fields_are_those_of_chats() -> None:
    given = {"temperature": 0, "top_k": 0, "seed": 5, "stop": "a", "logit_bias": {"7": 1.5}}
    more = {"add_special_tokens": False, "cache_salt": "s", "structured_outputs": {"regex": "a+"}}
    more |= {"user": "a", "tools": None}
    request = await parse(prompt="Hi", rapid={"mode": "lossless"}, **given, **more)
    assert request.ignored == ("user",)
    assert (request.temperature, request.top_k, request.seed, request.stop) == (0, None, 5, ("a",))
    assert request.logit_bias == ((7, 1.5),)
    assert not request.adds_special_tokens
    assert request.grammar
    assert request.cache_salt == "s"
    assert request.speculation.mode == "lossless"


async def test_the_sdk_gets_every_choice_of_every_prompt() -> None:
    service = Continuing()
    answer = await client(service).completions.create(
        model="m", prompt=["one two", "three"], n=2, logprobs=1, max_tokens=3
    )
    assert [each.index for each in answer.choices] == [0, 1, 2, 3]
    assert [each.text for each in answer.choices] == [" 0!", " 1!", " 2!", " 3!"]
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    logprobs = answer.choices[3].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" 3", "!"]
    assert logprobs.text_offset == [0, 2]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{" 3": -0.5}, {"!": -0.5}]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * 8
    assert answer.model_extra["rapid"]["contract"] == "fused"  # type: ignore[index]


async def test_a_stream_says_the_same_as_the_whole() -> None:
    asked: dict[str, Any] = {"prompt": ["one two", "three"], "echo": True, "logprobs": 1}
    whole = await client(Continuing()).completions.create(model="m", **asked)
    stream = await client(Continuing()).completions.create(
        model="m", stream=True, stream_options={"include_usage": True}, **asked
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        own = [each.choices[0] for each in chunks[:-1] if each.choices[0].index == choice.index]
        assert "".join(each.text for each in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            parts = [getattr(each.logprobs, name) for each in own]
            assert [part for each in parts for part in each] == getattr(choice.logprobs, name)


async def test_likelihoods_are_read_by_lm_evaluation_harness() -> None:
    """As its `LocalCompletionsAPI` asks and reads, in lm_eval/models/openai_completions.py."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    prompts, num_context = [[1, 2, 3, 4], [1, 2, 3, 5, 6]], 3
    answer = await client(Continuing()).completions.create(
        model="m", prompt=prompts, echo=True, **asked
    )
    body = answer.model_dump()
    for choice, prompt in zip(body["choices"], prompts, strict=True):
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        own = told["token_logprobs"][num_context : len(prompt)]
        assert own == [-0.25] * (len(prompt) - num_context)
        for logprob, top in zip(own, told["top_logprobs"][num_context:], strict=False):
            assert logprob == max(top.values())


async def test_what_is_no_character_has_its_bytes_and_what_is_impossible_a_number() -> None:
    half = "😀".encode()[:2].decode("utf-8", "surrogateescape")
    said = TextDelta(0, "", (TokenText(half, -math.inf, (("a", -0.5),)),), "length")
    service = ScriptedOrchestrator(STARTED, said, Finished(receipt()))
    answer = await client(service).completions.create(model="m", prompt="Hi", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["bytes:\\xf0\\x9f"]
    assert logprobs.top_logprobs == [{"a": -0.5, "bytes:\\xf0\\x9f": -9999.0}]


async def test_a_stream_that_broke_goes_on() -> None:
    body = {"model": "m", "prompt": ["one", "two"], "stream": True, "logprobs": 0, "seed": 1}
    app = Ingress(Continuing(), CONFIG)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as http:
        whole = (await http.post("/v1/completions", json=body)).text
        chunks = [json.loads(line[6:]) for line in whole.splitlines() if "{" in line]
        event_id = chunks[1]["rapid_event_id"]
        rest = (
            await http.post("/v1/completions", json=body, headers={"last-event-id": event_id})
        ).text
    assert whole.startswith("\n\ndata: ")  # it begins before the prompts are read
    again = [json.loads(line[6:]) for line in rest.splitlines() if "{" in line]
    assert [each["choices"] for each in again] == [each["choices"] for each in chunks[2:]]


async def test_errors_name_the_prompt() -> None:
    service = ScriptedOrchestrator(BadRequest("the prompt is odd", "messages"))
    with pytest.raises(openai.BadRequestError) as refused:
        await client(service).completions.create(model="m", prompt="Hi")
    assert refused.value.param == "prompt"
