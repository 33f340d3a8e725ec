"""The embedded models behind the page, in one process and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import cached_property

import rapid
from rapid.answering.request import RequestRun
from rapid.events import GenerationEvent
from rapid.messages import GenerateRequest
from tests.deployments.scripted import Generator


class SmallModels(Generator):
    """Answers with the embedded models, which are loaded for the first question."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        pair = await asyncio.to_thread(lambda: self._pair)
        events = RequestRun(pair._services, request).events()
        while True:
            event = await asyncio.to_thread(pair._loop.run, lambda: anext(events, None))
            if event is None:
                return
            yield event

    @cached_property
    def _pair(self) -> rapid.Pair:
        return rapid.open("embedded:target", drafter="embedded:drafter")
