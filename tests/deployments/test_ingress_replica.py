"""Which way a request goes to the orchestrator: as a gRPC message, or by reference if too large."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.ingress_replica import RemoteOrchestrator
from rapid.messages import Document, GenerateRequest, Message

LONG = "x" * (2**20 + 1)


class ScriptedHandle:
    """A Serve handle that remembers its options and answers nothing."""

    def options(self, **options: Any) -> ScriptedHandle:
        self.given = options
        return self

    def remote(self, request: GenerateRequest) -> ScriptedHandle:
        return self

    def __aiter__(self) -> ScriptedHandle:
        return self

    async def __anext__(self) -> Any:
        raise StopAsyncIteration

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(
    ("fields", "by_reference"),
    [
        ({}, False),
        ({"documents": (Document("a", LONG),)}, True),
        ({"documents": (Document(LONG, "a"),)}, True),
        ({"messages": (Message("user", LONG),)}, True),
        ({"query": LONG}, True),
        ({"stop": (LONG,)}, True),
    ],
)
async def test_every_text_of_the_caller_counts(fields: Any, by_reference: bool) -> None:
    handle = ScriptedHandle()
    settings = {"messages": (Message("user", "Which?"),)} | fields
    request = GenerateRequest("r", "local", **settings)
    async for _ in RemoteOrchestrator(handle).generate(request):  # type: ignore[arg-type]
        pass
    assert handle.given["_by_reference"] == by_reference
