"""The events of one request, until its answer is complete or its client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest
from ray.exceptions import TaskCancelledError

from deployments.api.http.event_feed import ClientLeft, EventFeed, read_deadline
from rapid.errors import BadRequest, DeadlinePassed, EngineFailed
from rapid.events import GenerationEvent, TextDelta


class Client:
    """A connection that stays open until it is told to close, or to fail."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.closes, self.failure = asyncio.Event(), failure

    async def receive(self) -> MutableMapping[str, Any]:
        await self.closes.wait()
        if self.failure is not None:
            raise self.failure
        return {"type": "http.disconnect"}


class Answer:
    """A generation of one event that then waits, until it `goes_on` to its `end`."""

    def __init__(self, end: BaseException | None = None) -> None:
        self.end = end
        self.goes_on, self.is_closed = asyncio.Event(), False

    async def events(self, _: Any) -> AsyncGenerator[GenerationEvent]:
        try:
            yield TextDelta(0, "Hel")
            await self.goes_on.wait()
            if self.end is not None:
                raise self.end
        finally:
            self.is_closed = True


def feed_of(answer: Answer, client: Client) -> EventFeed:
    return EventFeed(answer.events, client.receive, lambda _: None, lambda error: error)


async def test_an_event_that_does_not_come_in_time_is_none_and_comes_later() -> None:
    answer = Answer(KeyError("lost"))
    async with feed_of(answer, Client()) as feed:
        assert await feed.next() == TextDelta(0, "Hel")
        assert await feed.next(patience_s=0) is None
        answer.goes_on.set()
        with pytest.raises(KeyError, match="lost"):
            await feed.next()


@pytest.mark.parametrize("failure", [None, TaskCancelledError()])
async def test_a_client_that_leaves_ends_the_feed_and_leaving_it_the_generation(
    failure: Exception | None,
) -> None:
    """Serve's `receive` fails where its call to the proxy is cancelled."""
    client, answer = Client(failure), Answer()
    async with feed_of(answer, client) as feed:
        await feed.next()
        client.closes.set()
        with pytest.raises(ClientLeft):
            await feed.next()
        assert not answer.is_closed
    assert answer.is_closed


@pytest.mark.parametrize("failure", [None, TaskCancelledError()])
async def test_a_call_that_is_cancelled_because_the_client_leaves_is_no_error(
    failure: Exception | None,
) -> None:
    """Serve cancels the call of a client that leaves, and only then says that it has left."""
    client, answer = Client(failure), Answer(asyncio.CancelledError())
    answer.goes_on.set()
    async with feed_of(answer, client) as feed:
        await feed.next()
        assert await feed.next(patience_s=0.01) is None
        client.closes.set()
        with pytest.raises(ClientLeft):
            await feed.next()


@pytest.mark.parametrize(
    ("end", "sentence"),
    [(None, "without its receipt"), (asyncio.CancelledError(), "cancelled on the server")],
)
async def test_an_answer_that_just_stops_is_an_error(
    end: BaseException | None, sentence: str
) -> None:
    answer = Answer(end)
    answer.goes_on.set()
    async with feed_of(answer, Client()) as feed:
        await feed.next()
        with pytest.raises(EngineFailed, match=sentence):
            await feed.next()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), ("30", 28.0), ("2.5", 0.5), ("1", -1.0), ("2000-01-01T00:00:00Z", -1e8)],
)
def test_a_deadline_is_a_number_of_seconds_or_a_time(given: str | None, seconds: float | None):
    left = read_deadline(given, 2.0)
    if given is None or seconds is None:
        assert left is None
    else:
        assert left is not None
        assert left == seconds or left < seconds == -1e8


@pytest.mark.parametrize("given", ["", "soon", "-1", "1e3", "2026-01-31", "2026-01-31T12:00:00"])
def test_another_deadline_is_refused_by_its_name(given: str):
    with pytest.raises(BadRequest) as refused:
        read_deadline(given, 0.0)
    assert refused.value.param == "x-request-deadline"


async def test_an_answer_that_comes_too_late_is_ended():
    answer, client = Answer(), Client()
    async with EventFeed(
        answer.events, client.receive, lambda _: None, lambda error: error, 0.01
    ) as feed:
        assert await feed.next() == TextDelta(0, "Hel")
        with pytest.raises(DeadlinePassed):
            await feed.next()
    assert answer.is_closed
