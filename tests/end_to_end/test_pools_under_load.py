"""Pools that grow, shrink and are left alone, through HTTP, with engines that only keep ledgers."""

from __future__ import annotations

import asyncio
import json
import runpy
from typing import Any

import httpx
import psutil
import pytest

from tests.fakes import scripted_token
from tests.ray_cluster import BEFORE_EXPIRY_S, Fakes, wait_until

pytestmark = pytest.mark.ray


def body(seed: int, mode: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "fakes",
        "messages": [{"role": "user", "content": "Which harbour?"}],
        "seed": seed,
        "max_tokens": max_tokens,
        "rapid": {"mode": mode, "explain": "tokens"},
        **fields,
    }


async def test_pools_scale_apart_and_come_back_and_no_request_is_lost(fakes: Fakes) -> None:
    """Sixteen clients ask on until the pools have two and three replicas, then leave."""
    has_scaled = asyncio.Event()

    async def watch() -> None:
        replicas = {"Target": 1, "Drafter": 1}
        while replicas["Target"] < 2 or replicas["Drafter"] < 3:
            await asyncio.sleep(0.2)
            replicas = await asyncio.to_thread(fakes.replicas)
        has_scaled.set()

    async def ask(client: httpx.AsyncClient, index: int) -> None:
        while not has_scaled.is_set():
            seed = 100_000 + index  # 100 ms a step
            reply = await client.post("/v1/chat/completions", json=body(seed, "lossless", 60))
            assert reply.status_code == 200, reply.text
            explain = reply.json()["rapid"]["explain"]
            script = [scripted_token(index, 0, position) for position in range(60)]
            assert explain["token_ids"] == [script]

    async with httpx.AsyncClient(base_url=fakes.url, timeout=120) as client:
        asking = asyncio.gather(*(ask(client, index) for index in range(16)))
        await asyncio.wait_for(watch(), 90)
        await asking
    wait_until(lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)

    def is_back() -> bool:
        replicas = fakes.replicas()
        return (replicas["Target"], replicas["Drafter"]) == (1, 1)

    wait_until(is_back, 60, every_s=0.5)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_who_loses_the_orchestrator_is_answered_by_another(
    fakes: Fakes, is_streamed: bool
) -> None:
    """Its process is killed while the answer grows."""
    request = body(30_003, "lossless", 200, stream=is_streamed)
    async with httpx.AsyncClient(base_url=fakes.url, timeout=60) as client:
        undisturbed = await client.post("/v1/chat/completions", json=request)
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=request))
        await asyncio.to_thread(wait_until, lambda: fakes.held()[0] == 2, 10)
        for process in psutil.Process().children(recursive=True):
            if "ray::ServeReplica:fakes:Orchestrator" in " ".join(process.cmdline()[:1]):
                process.kill()
        disturbed = await asking
    assert disturbed.status_code == 200, disturbed.text
    assert said(disturbed.text) == said(undisturbed.text)
    assert '"failovers":["orchestrator lost"]' in disturbed.text
    assert disturbed.text.count("data: [DONE]") == is_streamed
    await asyncio.to_thread(wait_until, lambda: fakes.held() == (0, 0), 20)


def said(text: str) -> str:
    """The text of an answer, streamed or not."""
    bodies = [line.removeprefix("data: ") for line in text.splitlines() if line[:5] == "data:"]
    if not bodies:
        content: str = json.loads(text)["choices"][0]["message"]["content"]
        return content
    assert bodies.pop() == "[DONE]"
    choices = [choice for each in bodies for choice in json.loads(each)["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_leaves_frees_everything_at_once(
    fakes: Fakes, is_streamed: bool
) -> None:
    request = body(100_001, "lossless", 900, stream=is_streamed)
    async with httpx.AsyncClient(base_url=fakes.url, timeout=30) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=request))
        await asyncio.to_thread(wait_until, lambda: fakes.held()[0] == 2, 10)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await asyncio.to_thread(wait_until, lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_a_client_that_leaves_the_queue_is_forgotten(fakes: Fakes) -> None:
    """One that never got its lease leaves nothing behind either."""
    async with httpx.AsyncClient(base_url=fakes.url, timeout=30) as client:
        crowd = [
            asyncio.create_task(
                client.post("/v1/chat/completions", json=body(300_000, "plain", 900, n=8))
            )
            for _ in range(12)
        ]
        await asyncio.to_thread(wait_until, lambda: fakes.held()[0] >= 1, 10)
        await asyncio.sleep(0.5)
        for each in crowd:
            each.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    await asyncio.to_thread(wait_until, lambda: fakes.held() == (0, 0), BEFORE_EXPIRY_S)


async def test_a_stream_outlives_its_ingress(fakes: Fakes) -> None:
    """The client of the examples goes on where the killed ingress stopped."""
    chunks = runpy.run_path("examples/continuing_client.py")["chunks"]
    request = body(30_009, "lossless", 200)

    def stream(kill_after: int) -> str:
        text = ""
        for index, chunk in enumerate(chunks(fakes.url, request)):
            if index == kill_after:
                for process in psutil.Process().children(recursive=True):
                    if "ray::ServeReplica:fakes:Ingress" in " ".join(process.cmdline()[:1]):
                        process.kill()
            text += "".join(each["delta"].get("content", "") for each in chunk["choices"])
        return text

    undisturbed = await asyncio.to_thread(stream, -1)
    assert await asyncio.to_thread(stream, 4) == undisturbed
    await asyncio.to_thread(wait_until, lambda: fakes.held() == (0, 0), 20)
