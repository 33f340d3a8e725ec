"""The pace at which text leaves an orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import chain

from rapid.answering.answers import join_neighbours
from rapid.events import ChoiceDelta, GenerationEvent

_EVERY_S = 0.05


async def pace(
    events: AsyncGenerator[GenerationEvent], every_s: float = _EVERY_S
) -> AsyncGenerator[GenerationEvent]:
    """Yield `events`, with text at most once in so many seconds: what comes sooner is joined.

    The first text is not held back, and no text longer than `every_s`. A message to the ingress
    costs an orchestrator about as much as a call of an engine, while rounds may be shorter than
    anybody reads. The events are taken in a task of their own, so no round waits for the caller.

    Args:
        events: The events of a request; closing this generator closes them.
        every_s: Seconds between two messages with text.
    """
    ready: list[GenerationEvent] = []
    has_news = asyncio.Event()

    async def take() -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    ready.append(event)
                    has_news.set()
        finally:
            has_news.set()

    taking = asyncio.create_task(take())
    try:
        while ready or not taking.done():
            await has_news.wait()
            has_news.clear()
            batch = [*join_deltas(ready)]
            ready.clear()
            for event in batch:
                yield event
            if any(isinstance(event, ChoiceDelta) for event in batch):
                await asyncio.wait({taking}, timeout=every_s)
        await taking
    finally:
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


def join_deltas(events: Sequence[GenerationEvent]) -> Iterator[GenerationEvent]:
    """Yield events with the deltas between two others joined for each choice."""
    deltas: dict[int, list[ChoiceDelta]] = {}
    for event in events:
        if isinstance(event, ChoiceDelta):
            deltas.setdefault(event.choice, []).append(event)
            continue
        yield from chain.from_iterable(map(join_neighbours, deltas.values()))
        deltas.clear()
        yield event
    yield from chain.from_iterable(map(join_neighbours, deltas.values()))
