"""Text that comes faster than it is sent on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from deployments.orchestrator.pacing import join_deltas, pace
from rapid.errors import TargetUnavailable
from rapid.events import GenerationEvent, Reading, Started, TextDelta, TokenText

STARTED = Started("plain", "asked for", "target", "asked for")
NEVER_S = 1000.0


def delta(text: str, choice: int = 0, finish: bool = False) -> TextDelta:
    return TextDelta(choice, text, (TokenText(text, -0.5),), "stop" if finish else None)


class Source:
    """A request whose events come when they are put."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[GenerationEvent | Exception | None] = asyncio.Queue()
        self.is_closed = False

    async def events(self) -> AsyncGenerator[GenerationEvent]:
        try:
            while (event := await self.queue.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.is_closed = True

    async def put(self, *events: GenerationEvent | Exception | None) -> None:
        for event in events:
            self.queue.put_nowait(event)
        for _ in range(20):
            await asyncio.sleep(0)


async def test_the_first_text_comes_at_once_and_what_follows_within_the_pace_as_one() -> None:
    source = Source()
    sent = pace(source.events(), NEVER_S)
    await source.put(STARTED)
    assert await anext(sent) == STARTED
    await source.put(delta("a"))
    assert await anext(sent) == delta("a")
    following = asyncio.ensure_future(anext(sent))
    await source.put(delta("b"), delta("c"))
    assert not following.done()
    await source.put(delta("d", finish=True), None)  # its end is not waited for
    last = await following
    assert isinstance(last, TextDelta)
    assert (last.text, last.finish_reason, len(last.logprobs)) == ("bcd", "stop", 3)
    assert [event async for event in sent] == []


async def test_no_text_is_held_back_longer_than_the_pace() -> None:
    source = Source()
    sent = pace(source.events(), 0.01)
    for text in "abc":  # each is taken before the next is there
        await source.put(delta(text))
        assert await anext(sent) == delta(text)
    await sent.aclose()


async def test_what_was_made_before_a_failure_is_sent_before_it_is_raised() -> None:
    source = Source()
    sent = pace(source.events(), NEVER_S)
    await source.put(delta("a"), delta("b"), TargetUnavailable("lost"))
    first = await anext(sent)
    assert isinstance(first, TextDelta)
    assert first.text == "ab"
    with pytest.raises(TargetUnavailable):
        await anext(sent)


@pytest.mark.parametrize("num_taken", [0, 1, 2])
async def test_who_leaves_ends_the_request(num_taken: int) -> None:
    source = Source()
    sent = pace(source.events(), NEVER_S)
    await source.put(STARTED, delta("a"), delta("b"))
    for _ in range(num_taken):
        await anext(sent)
    await sent.aclose()
    assert source.is_closed == (num_taken > 0)  # else it has not begun
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_who_is_cancelled_while_it_waits_ends_the_request() -> None:
    source = Source()

    async def read() -> list[GenerationEvent]:
        return [event async for event in pace(source.events(), NEVER_S)]

    reading = asyncio.create_task(read())
    await source.put(STARTED, delta("a"), delta("b"))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.sleep(0.01)
    assert source.is_closed


def test_choices_are_joined_apart_and_nothing_is_joined_across_another_event() -> None:
    events = [delta("a"), delta("x", 1), delta("b"), Reading(5, 10), delta("c"), delta("d")]
    told = [
        (event.choice, event.text) if isinstance(event, TextDelta) else event
        for event in join_deltas(events)
    ]
    assert told == [(0, "ab"), (1, "x"), Reading(5, 10), (0, "cd")]
