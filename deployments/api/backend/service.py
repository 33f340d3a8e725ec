"""What the HTTP API needs of the application behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from rapid.errors import EngineFailed
from rapid.messages import GenerateRequest, GenerationEvent, Started


class GenerationService(Protocol):
    """The application behind the HTTP API: what runs its requests."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of a request, first those of `begin`; closing this aborts it."""
        ...

    async def ready(self) -> dict[str, Any]:
        """Return the state of pools and engines; ``ready`` holds whether requests can be served."""
        ...


async def begin(events: AsyncIterator[GenerationEvent]) -> AsyncIterator[GenerationEvent]:
    """Yield the events of an answer until it has begun; the rest is left in `events`.

    Documents may be embedded before it is known whether there is room, so `Reading` begins nothing.

    Raises:
        RapidError: The request is refused.
        EngineFailed: The answer ended without having begun.
    """
    async for event in events:
        yield event
        if isinstance(event, Started):
            return
    raise EngineFailed("The answer ended without having begun.")
