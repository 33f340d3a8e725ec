"""Routes about models that generate nothing, with OpenAI's SDK where it knows them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from rapid.errors import RetrievalUnavailable
from tests.deployments.api.files.test_files_by_sdk import World, world  # pytest.mark.slow
from tests.deployments.scripted import ScriptedOrchestrator

__all__ = ["world"]


HI = {"role": "user", "content": "Hi"}
LOOK_UP = {"type": "function", "function": {"name": "look_up"}}


def app_of(**config: Any) -> Ingress:
    return Ingress(ScriptedOrchestrator(), ApiConfig(model="m", **config))


def http_of(app: Ingress) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


async def post(path: str, **fields: Any) -> httpx.Response:
    async with http_of(app_of(max_characters=500, max_model_len=64)) as http:
        return await http.post(path, json=fields)


def sdk_of(app: Ingress) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="none", base_url="http://127.0.0.1/v1", http_client=http_of(app), max_retries=0
    )


async def test_a_text_has_tokens_in_the_shape_of_vllm() -> None:
    reply = await post("/tokenize", model="m", prompt="ab", return_token_strs=True)
    assert reply.json() == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [1, 97, 98],
        "token_strs": ["^", "a", "b"],
    }
    reply = await post("/tokenize", prompt="ab", add_special_tokens=False)
    assert reply.json() == {"count": 2, "max_model_len": 64, "tokens": [97, 98]}


async def test_a_chat_has_those_of_its_template() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    reply = await post("/tokenize", model="m", messages=chat, add_generation_prompt=True)
    assert reply.json()["count"] == 3


async def test_the_tools_and_files_of_a_chat_are_counted_as_a_chat_has_them(world: World) -> None:
    file_id = await world.upload()
    await world.ingest()
    parts = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": "Hi"}]
    fields = {
        "messages": [{"role": "user", "content": parts, "name": "Ann"}],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "mm_processor_kwargs": {"a": 1},
    }
    async with http_of(world.app) as http:
        key = {"authorization": "Bearer sk-a"}
        reply = await http.post("/tokenize", json=fields, headers=key)
    assert reply.json()["rapid"] == {"ignored": ["messages[].name", "mm_processor_kwargs"]}
    (sent,) = world.service.requests
    assert [each.name for each in sent.documents] == ["doors.txt"]
    assert sent.messages[0].documents == ("doors.txt",)
    assert [each.name for each in sent.tools.tools] == ["look"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/detokenize", {"tokens": [97]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["a"]}),
    ],
)
async def test_what_is_ignored_is_named(path: str, fields: dict[str, Any]) -> None:
    assert "rapid" not in (await post(path, **fields)).json()
    told = (await post(path, **fields, user="u", model=None, x=1)).json()
    assert told["rapid"] == {"ignored": ["user", "x"]}


LOOK: Any = {"name": "look", "input_schema": {"type": "object"}}


async def test_anthropics_sdk_counts_the_tokens_of_a_message() -> None:
    app = app_of()
    client = anthropic.AsyncAnthropic(
        api_key="none",
        base_url="http://127.0.0.1",
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(app)),
        max_retries=0,
    )
    source: Any = {"type": "text", "media_type": "text/plain", "data": "The door is red."}
    content: Any = [{"type": "document", "source": source}, {"type": "text", "text": "Hi"}]
    counted = await client.messages.count_tokens(
        model="m", system="Be brief.", messages=[{"role": "user", "content": content}], tools=[LOOK]
    )
    assert counted.input_tokens == 3
    service: Any = app._service
    (sent,) = service.requests
    assert [each.text for each in sent.documents] == ["The door is red."]
    assert [each.name for each in sent.tools.tools] == ["look"]
    assert sent.messages[0].text == "Be brief."
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.count_tokens(model="m", messages=[])
    assert refused.value.body["error"]["param"] == "messages"  # type: ignore[index, call-overload]
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(model="x", messages=[{"role": "user", "content": "a"}])


async def test_openais_sdk_counts_the_tokens_of_an_input() -> None:
    app = app_of(requests_per_minute=2)
    counted = await sdk_of(app).responses.input_tokens.count(input="Hello", instructions="Be brief")
    assert (counted.input_tokens, counted.object) == (6, "response.input_tokens")
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk_of(app).responses.input_tokens.count(input=[{"type": "no"}])  # type: ignore[list-item]
    assert refused.value.param == "input[0].type"
    await sdk_of(app).responses.input_tokens.count(model="m", input="Hello")
    with pytest.raises(openai.RateLimitError):
        await sdk_of(app).responses.input_tokens.count(model="m", input="Hello")


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/messages/count_tokens"])
async def test_a_question_is_admitted_before_it_is_read_to_be_counted(path: str) -> None:
    async with http_of(app_of(requests_per_minute=1)) as http:
        assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 200
        unreadable = {"messages": 5, "input": 5}
        assert (await http.post(path, json=unreadable)).status_code == 429


async def test_tokens_have_a_text() -> None:
    assert (await post("/detokenize", model="m", tokens=[72, 105])).json() == {"prompt": "Hi"}
    assert (await post("/detokenize", tokens=[])).json() == {"prompt": ""}


async def test_the_server_says_its_version() -> None:
    async with http_of(app_of()) as http:
        assert (await http.get("/version")).json()["version"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "why"),
    [
        ("/tokenize", {}, "messages", "or prompt must be given"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages", "must not be empty"),
        ("/tokenize", {"prompt": 5}, "prompt", "valid string"),
        ("/tokenize", {"prompt": "a" * 501}, "prompt", "maximum context length is 64 tokens"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt", ""),
        ("/detokenize", {}, "tokens", "is missing"),
        ("/v1/embeddings", {"input": ["a" * 300, "b" * 300]}, "input", "600 characters"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 500]}, "documents", "501 characters"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "list of token ids"),
        ("/detokenize", {"tokens": [2**22]}, "tokens", "no such token"),
        ("/v1/embeddings", {}, "input", "is missing"),
        ("/v1/embeddings", {"input": []}, "input", "1 to 2048 texts"),
        ("/v1/embeddings", {"input": [[1, 2]]}, "input", "no token ids"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input", "none of them empty"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions", "is not supported"),
        ("/v1/embeddings", {"input": "a", "normalize": False}, "normalize", "is not supported"),
        (
            "/v1/embeddings",
            {"input": "a", "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens",
            "is not supported",
        ),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["a"], "max_tokens_per_doc": 5},
            "max_tokens_per_doc",
            "is not supported",
        ),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens", "is"),
        ("/tokenize", {"prompt": "a", "tools": [LOOK_UP]}, "tools", "go with messages"),
        ("/tokenize", {"messages": [HI], "tools": [{}]}, "tools[0].type", "is missing"),
        (
            "/tokenize",
            {"messages": [HI], "add_special_tokens": True},
            "add_special_tokens",
            "goes with prompt",
        ),
        (
            "/tokenize",
            {"messages": [HI | {"prefix": True}]},
            "messages[0].prefix",
            "is not supported",
        ),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "1 to 2048"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents", "texts only"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "must not be empty"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str, why: str
) -> None:
    reply = await post(path, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert why in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/embeddings", "/v1/rerank"])
async def test_a_model_that_is_none_is_not_found(path: str) -> None:
    asked = {"prompt": "a", "tokens": [97], "input": "a", "query": "a", "documents": ["a"]}
    reply = await post(path, model="another", **asked)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("form", ["float", "base64", None])
async def test_the_sdk_gets_vectors(form: Any) -> None:
    how = {} if form is None else {"encoding_format": form}  # the SDK asks for base64 by itself
    reply = await sdk_of(app_of()).embeddings.create(model="lengths", input=["abc", "d"], **how)
    assert reply.model == "lengths"
    assert [each.index for each in reply.data] == [0, 1]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == 4
    if form != "base64":
        assert [each.embedding for each in reply.data] == [[3.0, 0.5], [1.0, 0.5]]
    else:
        assert reply.data[0].embedding == "AABAQAAAAD8="  # as the SDK passes it on


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_documents_are_ranked_in_the_shape_of_cohere_and_jina(path: str) -> None:
    documents = ["xyz", {"text": "ab"}, "axbx"]
    reply = (await post(path, query="ab", documents=documents, top_n=2)).json()
    assert reply["results"] == [
        {"index": 1, "relevance_score": 1.0, "document": {"text": "ab"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "axbx"}},
    ]
    assert reply["model"] == "lengths"
    assert reply["usage"]["total_tokens"] == 9
    short = (await post(path, query="ab", documents=documents, return_documents=False)).json()
    assert [each["index"] for each in short["results"]] == [1, 2, 0]
    assert set(short["results"][0]) == {"index", "relevance_score"}
    assert all(math.isfinite(each["relevance_score"]) for each in short["results"])


async def test_vectors_count_into_the_quota() -> None:
    app = app_of(requests_per_minute=2)
    async with http_of(app) as http:
        statuses = [
            (await http.post("/v1/embeddings", json={"input": "a"})).status_code for _ in range(3)
        ]
        rest = await http.post("/v1/rerank", json={"query": "a", "documents": ["a"]})
    assert statuses == [200, 200, 429]
    assert rest.status_code == 429
    assert rest.headers["x-ratelimit-limit-requests"] == "2"


EACH = pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["a"]}),
    ],
)


@EACH
async def test_each_counts_as_a_request(path: str, fields: dict[str, Any]) -> None:
    async with http_of(app_of(requests_per_minute=1)) as http:
        statuses = [(await http.post(path, json=fields)).status_code for _ in range(2)]
    assert statuses == [200, 429]


@EACH
async def test_each_takes_a_place(path: str, fields: dict[str, Any]) -> None:
    app = app_of(max_requests_per_tenant=1)
    async with http_of(app) as http:
        async with app._admission.place("local"):
            answering = asyncio.create_task(http.post(path, json=fields))
            assert not (await asyncio.wait({answering}, timeout=0.1))[0]
        assert (await answering).status_code == 200


class Unlucky(ScriptedOrchestrator):
    """Has done the work when it hangs, or fails."""

    def __init__(self, end: Exception | None) -> None:
        super().__init__()
        self.end = end

    async def embed(self, *_: Any, **__: Any) -> Any:
        self.asked.set()
        if self.end is not None:
            raise self.end
        await asyncio.Event().wait()


@pytest.mark.parametrize(("end", "remaining"), [(None, "1"), (RetrievalUnavailable("lost"), "13")])
async def test_what_was_reserved_is_refunded_where_the_server_failed_alone(
    end: Exception | None, remaining: str
) -> None:
    service = Unlucky(end)
    app = Ingress(service, ApiConfig(model="m", tokens_per_minute=20))
    async with http_of(app) as http:
        first = asyncio.create_task(http.post("/v1/embeddings", json={"input": "äöü" * 2}))
        await service.asked.wait()
        if end is None:
            first.cancel()
        await asyncio.wait({first})
        service.end = RetrievalUnavailable("lost")
        reply = await http.post("/v1/embeddings", json={"input": "1234567"})
    assert reply.headers["x-ratelimit-remaining-tokens"] == remaining
