"""Streams as the benchmark clients of vLLM and SGLang read them, which are no parsers of events.

Their ways of reading are written here anew, and fed with one byte at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from rapid.events import Finished, Reading, TextDelta
from tests.deployments.scripted import STARTED, ScriptedOrchestrator, receipt

ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
}
TEXT = "Hello, wörld!\u2028"
SCRIPT = (
    STARTED,
    0.05,
    Reading(512, 4000),
    TextDelta(0, "Hello"),
    0.05,
    TextDelta(0, ", wörld"),
    TextDelta(0, "!\u2028", (), "stop"),
    Finished(receipt()),
)


async def stream(**change: Any) -> bytes:
    """The bytes of a stream with silence before and between its chunks."""
    app = Ingress(ScriptedOrchestrator(*SCRIPT), ApiConfig(model="m", heartbeat_s=0.01))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        response = await http.post("/v1/chat/completions", json=ASK | change)
    assert response.content.count(b"\n\n\n\n" if not change else b"\n\n: ") > 1
    return response.content


def as_vllm(content: bytes) -> Iterator[Any]:
    """vLLM's `bench serve`: blocks between blank lines, of which comments are dropped.

    What looks like a whole block before its end is taken at once.
    """

    def read(block: str) -> Iterator[Any]:
        block = block.strip()
        if block and not block.startswith(":"):
            data = block.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)

    waiting = ""
    for index in range(len(content)):
        waiting += content[index : index + 1].decode()  # each byte must be a character
        while "\n\n" in waiting:
            block, waiting = waiting.split("\n\n", 1)
            yield from read(block)
        if waiting.startswith("data: ") and is_whole(waiting.removeprefix("data: ").strip()):
            yield from read(waiting)
            waiting = ""
    assert not waiting.strip()


def is_whole(data: str) -> bool:
    try:
        return data == "[DONE]" or json.loads(data) is not None
    except ValueError:
        return False


def as_sglang(content: bytes) -> Iterator[Any]:
    """SGLang's `bench_serving`: every line that is not blank is data, whatever it begins with."""
    for line in content.split(b"\n"):
        if line.strip():
            data = line.strip().decode().removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@pytest.mark.parametrize("parse", [as_vllm, as_sglang])
async def test_they_read_the_whole_answer(parse: Any) -> None:
    *chunks, usage, done = parse(await stream())
    assert done == "[DONE]"
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == TEXT
    assert usage["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("path", "asked", "filling"),
    [
        ("/v1/completions", {"prompt": "Hi"}, b"\n\n"),
        ("/v1/responses", {"input": "Hi"}, b"\n\n"),
        ("/v1/messages", {"messages": ASK["messages"], "max_tokens": 9}, b"event: ping"),
    ],
)
async def test_progress_fills_silence_in_every_dialect(path: str, asked: Any, filling: bytes):
    script = [STARTED, *[Reading(1, 4)] * 3, TextDelta(0, TEXT, (), "stop"), Finished(receipt())]
    sent: list[bytes] = []
    for steps in (script, [each for each in script if not isinstance(each, Reading)]):
        transport = httpx.ASGITransport(Ingress(ScriptedOrchestrator(*steps), ApiConfig(model="m")))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            answer = await http.post(path, json=asked | {"model": "m", "stream": True})
        sent.append(answer.content)
    assert sent[0].count(filling) == sent[1].count(filling) + 3


async def test_comments_swallow_nothing() -> None:
    content = await stream(rapid={"progress": True})
    assert b": reading 512 of 4000 tokens" in content
    *chunks, _, _ = as_vllm(content)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks) == TEXT
