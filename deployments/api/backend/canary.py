"""Two versions of the application beside each other, by share of the requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol

from deployments.api.backend.service import GenerationService, begin
from deployments.config.serve_config import CanaryConfig
from rapid.answering.document_keys import affinity_of
from rapid.errors import OrchestratorLost, Overloaded, TargetUnavailable
from rapid.messages import Finished, GenerateRequest, GenerationEvent


class WatchedService(GenerationService, Protocol):
    """Another application, whose signs of life are looked at until it is closed."""

    def close(self) -> None:
        """Look no more."""
        ...


Watch = Callable[[str], WatchedService]
"""Function from an application's name to its service; the application need not run."""


class WithCanary:
    """A `GenerationService` that leaves a share of the requests to another application.

    Receipts name the application that answered while there are two. What the other one cannot
    begin, because it is not ready or full, is answered by this one.
    """

    def __init__(self, own: GenerationService, own_name: str, watch: Watch) -> None:
        """Create the service.

        Args:
            own: The application that this ingress belongs to.
            own_name: Its name.
            watch: Begins to look at another application, which is ready once it is seen to be.
        """
        self._own, self._own_name, self._watch = own, own_name, watch
        self._canary: CanaryConfig | None = None
        self._other: WatchedService | None = None

    def configure(self, canary: CanaryConfig | None) -> None:
        """Take another application and its share, or none."""
        name = canary.application if canary else None
        if name != (self._canary.application if self._canary else None):
            if self._other is not None:
                self._other.close()
            self._other = self._watch(name) if name else None
        self._canary = canary

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of a request; closing the generator aborts it."""
        canary, other = self._canary, self._other
        if canary and other and position(request) < canary.share and (await other.ready())["ready"]:
            async with aclosing(other.generate(request)) as events:
                try:
                    async for event in begin(events):
                        yield event
                except (Overloaded, TargetUnavailable, OrchestratorLost):
                    pass
                else:
                    async for event in events:
                        yield _name(event, canary.application)
                    return
        async with aclosing(self._own.generate(request)) as events:
            async for event in events:
                yield _name(event, self._own_name) if canary else event

    async def ready(self) -> dict[str, Any]:
        """Return the state of this application, which answers whatever the other one cannot."""
        return await self._own.ready()


def position(request: GenerateRequest) -> float:
    """Return a number in [0, 1), the same for all requests that read the same long text."""
    name = affinity_of(request) or request.request_id
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) / 2**64


def _name(event: GenerationEvent, application: str) -> GenerationEvent:
    if isinstance(event, Finished):
        return replace(event, receipt=replace(event.receipt, application=application))
    return event
