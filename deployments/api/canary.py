"""Two versions of the application beside each other, by share of the requests."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from deployments.api.ingress import GenerationService
from deployments.config.serve_config import CanaryConfig
from rapid.answering.affinity import affinity_of
from rapid.errors import OrchestratorLost, Overloaded, TargetUnavailable
from rapid.messages import Finished, GenerateRequest, GenerationEvent
from rapid.ports import Clock

Reach = Callable[[str], Awaitable[GenerationService | None]]
"""Function from an application's name to its service, or to None while it does not run."""

_REACHED_FOR_S = 2.0


class WithCanary:
    """A `GenerationService` that leaves a share of the requests to another application.

    Receipts name the application that answered while there are two. What the other one cannot
    begin, because it does not run or is full, is answered by this one.
    """

    def __init__(
        self,
        own: GenerationService,
        own_name: str,
        reach: Reach,
        clock: Clock = time.monotonic,
    ) -> None:
        """Create the service.

        Args:
            own: The application that this ingress belongs to.
            own_name: Its name.
            reach: Finds the other application; asked at most every 2 s.
            clock: Monotonic seconds.
        """
        self._own, self._own_name, self._reach, self._clock = own, own_name, reach, clock
        self.configure(None)

    def configure(self, canary: CanaryConfig | None) -> None:
        """Take another application and its share, or none."""
        self._canary = canary
        self._other: GenerationService | None = None
        self._reached_at = -math.inf

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of a request; closing the generator aborts it."""
        canary = self._canary
        if canary is not None and position(request) < canary.share:
            other = await self._reached(canary.application)
            if other is not None:
                async with aclosing(other.generate(request)) as events:
                    try:
                        first = await anext(events)
                    except (Overloaded, TargetUnavailable, OrchestratorLost):
                        pass
                    else:
                        yield first
                        async for event in events:
                            yield _named(event, canary.application)
                        return
        async with aclosing(self._own.generate(request)) as events:
            async for event in events:
                yield _named(event, self._own_name) if canary else event

    async def ready(self) -> dict[str, Any]:
        """Return the state of this application, which answers whatever the other one cannot."""
        return await self._own.ready()

    async def _reached(self, application: str) -> GenerationService | None:
        if self._clock() - self._reached_at > _REACHED_FOR_S:
            self._reached_at = self._clock()
            self._other = await self._reach(application)
        return self._other


def position(request: GenerateRequest) -> float:
    """Return a number in [0, 1), the same for all requests that read the same long text."""
    name = affinity_of(request) or request.request_id
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) / 2**64


def _named(event: GenerationEvent, application: str) -> GenerationEvent:
    if isinstance(event, Finished):
        return replace(event, receipt=replace(event.receipt, application=application))
    return event
