"""The event feed of one request, which ends when its client disconnects."""

from __future__ import annotations

import asyncio
import datetime
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from typing import Any, Self

from rapid.errors import BadRequest, DeadlinePassed, EngineFailed
from rapid.events import Finished, GenerationEvent

_GOODBYE_S = 1.0  # after a cancelled call, for the connection to say that its client left

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Note = Callable[[GenerationEvent], None]


class ClientLeft(Exception):
    """The client closed the connection before the answer was complete."""


class EventFeed:
    """A context that runs a generation and watches its connection; leaving it ends both.

    One task owns the generation for its whole life and closes it wherever it stands, which frees
    the leases. Another polls the ASGI `receive`, the only way to learn of a disconnect. When a
    client leaves, Serve may cancel the call of the generation first, and its `receive` may fail
    instead of saying so.
    """

    def __init__(
        self,
        generate: Callable[[Note], AsyncGenerator[GenerationEvent]],
        receive: Receive,
        note: Note,
        explain: Callable[[Exception], Exception],
        most_s: float | None = None,
    ) -> None:
        """Run nothing yet.

        Args:
            generate: Begins the generation, and gives its argument what is said beside its events.
            receive: The connection's.
            note: Notes each event.
            explain: Returns an error of the generation as the caller is told it.
            most_s: Seconds after which the caller has no use for the answer; None for never.
        """
        self._generate, self._receive, self._note, self._explain = generate, receive, note, explain
        self._most_s = most_s
        self._queue: asyncio.Queue[GenerationEvent | BaseException] = asyncio.Queue()
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    async def __aenter__(self) -> Self:
        watching = asyncio.create_task(self._watch())
        self._tasks = (watching, asyncio.create_task(self._pump(watching)))
        if self._most_s is not None:
            self._tasks += (asyncio.create_task(self._expire(self._most_s)),)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begin(self, patience_s: float) -> AsyncIterator[GenerationEvent | None]:
        """Wait for the first event, and return all events; a refusal before it is an HTTP status.

        None stands for each `patience_s` seconds after it in which none comes; errors are those of
        `next`.
        """
        return self._follow(await self.next(), patience_s)

    async def _follow(
        self, event: GenerationEvent | None, patience_s: float
    ) -> AsyncIterator[GenerationEvent | None]:
        yield event
        while not isinstance(event, Finished):
            event = await self.next(patience_s)
            yield event

    async def next(self, patience_s: float | None = None) -> GenerationEvent | None:
        """Return the next event, or None when none arrives within `patience_s` seconds.

        Raises:
            ClientLeft: If the connection is closed.
            Exception: If the generation ended with an error.
        """
        try:
            async with asyncio.timeout(patience_s):
                event = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(event, BaseException):
            raise event
        return event

    async def _pump(self, watching: asyncio.Task[None]) -> None:
        try:
            async with aclosing(self._generate(self._queue.put_nowait)) as events:
                async for event in events:
                    self._note(event)
                    self._queue.put_nowait(event)
            self._queue.put_nowait(EngineFailed("The answer ended without its receipt."))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # on leaving the context: nobody reads the queue
                raise
            await asyncio.wait({watching}, timeout=_GOODBYE_S)  # it queues `ClientLeft` before this
            self._queue.put_nowait(EngineFailed("The answer was cancelled on the server."))
        except Exception as error:
            self._queue.put_nowait(self._explain(error))

    async def _expire(self, most_s: float) -> None:
        await asyncio.sleep(most_s)
        self._queue.put_nowait(DeadlinePassed())

    async def _watch(self) -> None:
        with suppress(Exception):  # the connection of a `receive` that fails is lost
            while (await self._receive())["type"] != "http.disconnect":
                pass
        self._queue.put_nowait(ClientLeft())


def read_deadline(given: str | None, elapsed_s: float) -> float | None:
    """Return the seconds that are left for an answer by a header ``x-request-deadline``.

    Args:
        given: Seconds from the request's arrival on, or a time of ISO 8601 with its zone.
        elapsed_s: Seconds since it arrived.

    Raises:
        BadRequest: It is neither.
    """
    if given is None:
        return None
    try:
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", given, re.ASCII):
            return float(given) - elapsed_s
        until = datetime.datetime.fromisoformat(given)
        if until.tzinfo is not None:
            return (until - datetime.datetime.now(datetime.UTC)).total_seconds()
    except ValueError:
        pass
    raise BadRequest(
        "x-request-deadline must be a number of seconds, or a time such as 2026-01-31T12:00:00Z.",
        "x-request-deadline",
        "invalid_value",
    )
