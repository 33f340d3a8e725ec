"""What the HTTP API needs of the application behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from rapid.messages import GenerateRequest, GenerationEvent


class GenerationService(Protocol):
    """The application behind the HTTP API: what runs its requests."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of a request; closing the generator aborts the request."""
        ...

    async def ready(self) -> dict[str, Any]:
        """Return the state of pools and engines; ``ready`` holds whether requests can be served."""
        ...
