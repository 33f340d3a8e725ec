"""The ledger of usage beside the clocks of the engines, one of which is killed under its answers.

Each engine writes down what its steps took before the first question, and the seconds that it
tells of leases, which the ledger has from nowhere else. Of the engine that is killed those count.
What its steps took for answers that had not ended is lost with it: nobody is charged for that.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from deployments.config.serve_config import ServeConfig
from deployments.pools.engine_actor import engines_of, load_engine
from library.accounts.callers import hash_key
from rapid.config import EngineConfig
from rapid.embedded.generator import generate_document
from rapid.engines.engine import Engine
from tests.ray_cluster import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

APP = "counted"
TENANTS = ("acme", "guest")
STEP_S = 0.02  # the least that a step takes, so that an answer lasts long enough to be disturbed
NUM_TOKENS = 48  # of every answer
POOL = {"num_cpus": 0.05}

Chunks = list[dict[str, Any]]


def load_noted(folder: Path, config: EngineConfig) -> Engine:
    """An engine that notes the seconds of its warming up and those that it tells, in a file."""
    engine = load_engine(config)
    runner = engine._compute.runner
    run, settle = runner.run, engine.settle
    file = folder / str(os.getpid())
    file.write_text(f"{engine.status().steps_s}\n")

    def run_slowly(feeds: Any) -> Any:
        time.sleep(STEP_S)
        return run(feeds)

    def settle_noted(lease_id: str) -> Any:
        used = settle(lease_id)
        with file.open("a") as told:
            told.write(f"{used.busy_s}\n")
        return used

    runner.run, engine.settle = run_slowly, settle_noted  # type: ignore[method-assign]
    return engine


@pytest.fixture
def url(ray_cluster: str, tmp_path: Path) -> Iterator[str]:
    from ray import serve

    from deployments.app import compose

    keys = [{"tenant": t, "sha256": hash_key(f"sk-{t}"), "operator": True} for t in TENANTS]
    config = ServeConfig.model_validate(
        {
            "target": {
                "engine": {"model": "embedded:target", "max_leases": 8},
                "pool": POOL | {"min_replicas": 2, "max_replicas": 2},
            },
            "drafter": {
                "engine": {"model": "embedded:drafter", "max_leases": 8},
                "pool": POOL | {"min_replicas": 1, "max_replicas": 1},
            },
            "retriever": {"retrieval": {"chunk_tokens": 64, "budget_tokens": 320}, "pool": POOL},
            "library": {"folder": tmp_path / "library", "pool": POOL},
            "orchestrator": {"draft_length": "fixed", "pool": POOL},
            "api": {"model": APP, "keys": keys, "pool": POOL},
        }
    )
    load = functools.partial(load_noted, tmp_path)
    serve.run(compose(config, load, load), name=APP, route_prefix=f"/{APP}")
    yield f"{ray_cluster}/{APP}"
    serve.delete(APP)


def body(number: int) -> dict[str, Any]:
    document = generate_document(number, 300)
    return {
        "model": APP,
        "messages": [{"role": "user", "content": document.questions[0].question}],
        "temperature": 1.5,
        "seed": number,
        "min_tokens": NUM_TOKENS,
        "max_tokens": NUM_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "rapid": {
            "mode": ("lossless", "plain")[number % 2],
            "max_draft": 4,
            "documents": [{"name": document.name, "text": document.text}],
        },
    }


async def read(
    http: httpx.AsyncClient,
    asked: tuple[str, int],
    chunks: Chunks,
    after: str = "",
    most: int = 999,
) -> None:
    """Ask a question of a tenant, or go on with its stream, until so many chunks have come."""
    tenant, number = asked
    headers = {"authorization": f"Bearer sk-{tenant}"} | ({"last-event-id": after} if after else {})
    stream = http.stream("POST", "/v1/chat/completions", json=body(number), headers=headers)
    async with stream as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
            if len(chunks) == most:
                return


def text_of(chunks: Chunks) -> str:
    choices = [each["choices"][0] for each in chunks if each["choices"]]  # the last has usage alone
    return "".join(each["delta"].get("content", "") for each in choices)


def usage(url: str) -> dict[str, dict[str, float]]:
    """What the ledger has by tenant."""
    headers = {"authorization": f"Bearer sk-{TENANTS[0]}"}
    found = httpx.get(f"{url}/v1/usage?tenant=*&group_by=tenant", headers=headers, timeout=30)
    return {each["tenant"]: each for each in found.raise_for_status().json()["data"]}


def tokens(found: dict[str, dict[str, float]]) -> list[tuple[float, ...]]:
    """Requests, tokens of prompts and tokens of answers, by tenant."""
    names = ("num_requests", "prompt_tokens", "completion_tokens")
    return [tuple(each[name] for name in names) for each in found.values()]


def look_at_engines(folder: Path) -> tuple[dict[int, int], float]:
    """Open leases by process of the targets that live, and the seconds of all engines."""
    leases, busy_s = {}, {}
    for file in folder.glob("[0-9]*"):
        busy_s[int(file.name)] = sum(map(float, file.read_text().split()[1:]))
    for name, engine in engines_of(APP).items():
        process, status = ray.get([engine.ping.remote(), engine.status.remote()], timeout=120)
        warming_s = float((folder / str(process)).read_text().split()[0])
        busy_s[process] = status.steps_s - warming_s
        if "/Target/" in name:
            leases[process] = status.leases_open
    return leases, sum(busy_s.values())


async def test_what_is_used_is_counted_once_though_an_engine_is_killed_and_streams_break(
    url: str, tmp_path: Path
) -> None:
    """A stream goes on elsewhere, one that its reader left goes on, and so does one that ended."""
    questions = [(tenant, number) for tenant in TENANTS for number in range(4)]

    async def ask_all(http: httpx.AsyncClient, *, is_killed: bool) -> list[Chunks]:
        answers: list[Chunks] = [[] for _ in questions]
        asked = [
            asyncio.create_task(read(http, *each)) for each in zip(questions, answers, strict=True)
        ]
        while is_killed and max(map(len, answers)) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if is_killed:
            leases, _ = await asyncio.to_thread(look_at_engines, tmp_path)
            os.kill(max(leases, key=leases.__getitem__), signal.SIGKILL)
        await asyncio.gather(*asked)
        return answers

    def is_told(cost: list[tuple[float, ...]]) -> bool:
        """Whether the ledger has this cost, and the seconds of the engines within a hundredth."""
        found = usage(url)
        told_s = sum(each["target_s"] + each["drafter_s"] for each in found.values())
        return tokens(found) == cost and abs(told_s / look_at_engines(tmp_path)[1] - 1) < 0.01

    def until_told(cost: list[tuple[float, ...]]) -> Awaitable[float]:
        return asyncio.to_thread(wait_until, lambda: is_told(cost), 60, 0.5)

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        whole = await ask_all(http, is_killed=False)
        prompts = [each[-1]["usage"]["prompt_tokens"] for each in whole[:4]]
        await until_told(2 * [(4, sum(prompts), 4 * NUM_TOKENS)])

        disturbed = await ask_all(http, is_killed=True)
        assert [*map(text_of, disturbed)] == [*map(text_of, whole)]
        assert any("target lost" in each[-2]["rapid"]["failovers"] for each in disturbed)
        await until_told(2 * [(8, 2 * sum(prompts), 8 * NUM_TOKENS)])

        for asked, answer in zip(questions, whole, strict=True):
            first: Chunks = []
            await read(http, asked, first, most=5)
            for _ in range(2):  # the second time as if the end had been lost
                rest: Chunks = []
                await read(http, asked, rest, first[-1]["rapid_event_id"])
                assert text_of(first + rest) == text_of(answer)
        await until_told(2 * [(12, 3 * sum(prompts), 12 * NUM_TOKENS)])
