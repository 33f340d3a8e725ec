"""A pool whose few slots are held until they are given back, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from cluster.leases import Granted
from rapid.messages import LeaseRequest
from tests.local_pools import LocalStream

ENGINE = SimpleNamespace(
    release=SimpleNamespace(remote=lambda lease_id: None),
    renew=SimpleNamespace(remote=lambda lease_id: asyncio.sleep(0)),
)


class FullPool:
    """A Serve handle: a few slots, first come, first served; an engine may let a lease wait."""

    deployment_name = deployment_id = "Target"

    def __init__(self, num_slots: int) -> None:
        self._slots = asyncio.Semaphore(num_slots)
        self.entered: list[str] = []
        self.has_pages = asyncio.Event()
        self.has_pages.set()

    def options(self, **_: Any) -> FullPool:
        return self

    def remote(self, request: LeaseRequest) -> LocalStream:
        return LocalStream(self._lease(request))

    async def _lease(self, request: LeaseRequest) -> AsyncIterator[Any]:
        async with self._slots:
            self.entered.append(request.lease_id.partition(".")[0])
            yield None
            if request.terms.max_tokens > 100:
                await self.has_pages.wait()
            yield Granted(ENGINE, "r1")
            await asyncio.Event().wait()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
