"""A prompt whose answer is known, leases on it, and a runner whose forwards wait for the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import torch

from rapid.engines.attention.batch import Feed
from rapid.engines.engine import Engine
from rapid.messages import Int32Array
from tests.rapid.tiny_models import lease_request, random_prompt, reference_greedy

PROMPT = random_prompt(40, seed=2)
EXPECTED = reference_greedy(PROMPT.tolist(), 6)


class Gate:
    """Stands in for the runner: forwards stop here until they are let through."""

    def __init__(self, engine: Engine) -> None:
        self._run = engine._compute.runner.run
        self._permits = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self.feeds: list[list[Feed]] = []
        self.before: Callable[[], None] = lambda: None
        self.is_open = False
        engine._compute.runner.run = self  # type: ignore[assignment]

    def __call__(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        self.feeds.append(list(feeds))
        self.arrived.release()
        if not self.is_open:
            self._permits.acquire()
        self.before()
        return self._run(feeds)

    async def forward_started(self) -> None:
        await asyncio.to_thread(self.arrived.acquire)

    def let_one_through(self) -> None:
        self._permits.release()

    def open(self) -> None:
        self.is_open = True
        self._permits.release()


async def opened(
    engine: Engine, lease_id: str = "a", *, prompt: Int32Array = PROMPT, **settings: object
) -> str:
    """Open and prefill a lease; return its id."""
    await engine.open(lease_request(lease_id, prompt, **settings))
    await engine.prefill(lease_id)
    return lease_id
