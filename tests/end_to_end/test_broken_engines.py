"""Engines that break while they are asked, in the real application with two targets.

The engines are the embedded model's. A file with the process id of one of them in its name breaks
that one: its forwards raise as after an illegal memory access.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray

from deployments.config.serve_config import ServeConfig
from deployments.pools.engine_actor import engines_of, load_engine
from rapid.config import EngineConfig
from rapid.embedded.generator import generate_document
from rapid.engines.engine import Engine
from tests.ray_cluster import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

logger = logging.getLogger(__name__)

APP = "breakable"
CONFIG: dict[str, Any] = {
    "target": {
        "engine": {"model": "embedded:target", "max_leases": 8},
        "pool": {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.05},
    },
    "drafter": "prompt_lookup",
    "orchestrator": {"draft_length": "fixed", "pool": {"num_cpus": 0.05}},
    "api": {"model": "breakable", "pool": {"num_cpus": 0.05}},
}


def load_breakable(folder: Path, config: EngineConfig) -> Engine:
    """An engine that looks for the file that breaks it before every forward, and leaves one."""
    import torch

    engine = load_engine(config)
    runner = engine._compute.runner
    run = runner.run

    def breakable(feeds: Any) -> Any:
        (folder / f"computes-{os.getpid()}").touch()
        if (folder / f"raise-{os.getpid()}").exists():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        return run(feeds)

    runner.run = breakable  # type: ignore[method-assign]
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("broken")


@pytest.fixture(scope="module")
def url(ray_cluster: str, folder: Path) -> Iterator[str]:
    from ray import serve

    from deployments.app import compose

    config = ServeConfig.model_validate(CONFIG)
    load = functools.partial(load_breakable, folder)
    serve.run(compose(config, load), name=APP, route_prefix="/breakable")
    yield f"{ray_cluster}/breakable"
    serve.delete(APP)


def processes() -> set[int]:
    """The processes of the engines that answer."""
    asked = [engine.ping.remote() for engine in engines_of(APP).values()]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=2) if asked else ([], [])
    found = set()
    for each in ready:
        try:
            found.add(ray.get(each))
        except Exception:  # it is being replaced
            continue
    return found


def body(number: int) -> dict[str, Any]:
    document = generate_document(number % 4, 150)
    return {
        "model": "breakable",
        "messages": [{"role": "user", "content": document.questions[number % 3].question}],
        "temperature": 1.0,
        "seed": number,
        "max_tokens": 24,
        "rapid": {"documents": [{"name": document.name, "text": document.text}]},
    }


class Load:
    """Four callers that ask until they are told to stop, and a prober beside them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = False
        self.replies: list[tuple[int, httpx.Response]] = []
        self.unready = 0

    async def __aenter__(self) -> Load:
        self._http = httpx.AsyncClient(base_url=self._url, timeout=120)
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(4)]
        self._tasks.append(asyncio.create_task(self._probe()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def _ask(self, number: int) -> None:
        while not self._is_over:
            reply = await self._http.post("/v1/chat/completions", json=body(number))
            self.replies.append((number, reply))
            number = (number + 4) % 8

    async def _probe(self) -> None:
        while not self._is_over:
            self.unready += (await self._http.get("/ready")).status_code != 200
            await asyncio.sleep(0.2)


async def broken(url: str, folder: Path, break_one: Callable[[int], None]) -> Load:
    """Break the engine that computes under load; return the load after it was replaced."""

    def find_last_forward(process: int) -> float:
        file = folder / f"computes-{process}"
        return file.stat().st_mtime if file.exists() else 0.0

    await asyncio.to_thread(wait_until, lambda: len(processes()) == 2, 300, 0.5)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        whole = [await http.post("/v1/chat/completions", json=body(n)) for n in range(8)]
    async with Load(url) as load:
        while len(load.replies) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        # A document belongs to one engine, and so all of them may belong to the same.
        victim = max(await asyncio.to_thread(processes), key=find_last_forward)
        break_one(victim)
        began = time.monotonic()
        await asyncio.to_thread(wait_until, lambda: not _lives(victim), 60, 0.1)
        gone_s = time.monotonic() - began
        await asyncio.to_thread(wait_until, lambda: len(processes()) == 2, 300, 0.5)
        num_before = len(load.replies)
        while len(load.replies) < num_before + 8:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    texts = [each.json()["choices"][0]["message"]["content"] for each in whole]
    for number, reply in load.replies:
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == texts[number]
    longest_s = max(reply.elapsed.total_seconds() for _, reply in load.replies)
    logger.info("gone after %.1f s, longest answer %.1f s", gone_s, longest_s)
    return load


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def failovers(load: Load) -> set[str]:
    return {each for _, reply in load.replies for each in reply.json()["rapid"]["failovers"]}


async def test_an_engine_whose_device_failed_is_replaced_and_no_request_fails(
    url: str, folder: Path
) -> None:
    load = await broken(url, folder, lambda process: (folder / f"raise-{process}").touch())
    assert failovers(load) <= {"target lost"}
    assert load.unready == 0


async def test_an_engine_whose_process_is_stopped_is_replaced_and_no_request_fails(
    url: str, folder: Path
) -> None:
    load = await broken(url, folder, lambda process: os.kill(process, signal.SIGSTOP))
    assert failovers(load) <= {"target lost", "target hung"}
    assert load.unready == 0
