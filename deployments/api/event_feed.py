"""The events of one request, as long as somebody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any, Self

from rapid.errors import EngineFailed
from rapid.messages import GenerationEvent

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientLeft(Exception):
    """The caller closed the connection: nobody reads the answer."""


class EventFeed:
    """Runs a generation and watches the connection; leaving the block ends both.

    One task owns the generation for all of its life and closes it wherever it stands, which is what
    frees the leases. The ASGI `receive` is watched beside it, since a server tells of a lost client
    only to those who ask.
    """

    def __init__(self, events: AsyncGenerator[GenerationEvent], receive: Receive) -> None:
        self._events, self._receive = events, receive
        self._queue: asyncio.Queue[GenerationEvent | BaseException] = asyncio.Queue()
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    async def __aenter__(self) -> Self:
        self._tasks = (asyncio.create_task(self._pump()), asyncio.create_task(self._watch()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, patience_s: float | None = None) -> GenerationEvent | None:
        """The next event; None when none came for `patience_s`.

        Raises:
            ClientLeft: the connection is closed.
            Exception: what ended the generation.
        """
        try:
            async with asyncio.timeout(patience_s):
                event = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(event, BaseException):
            raise event
        return event

    async def _pump(self) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    self._queue.put_nowait(event)
            self._queue.put_nowait(EngineFailed("The answer ended without its receipt."))
        except asyncio.CancelledError:  # if it is our own end, nobody reads this any more
            self._queue.put_nowait(EngineFailed("The answer was cancelled on the server."))
            raise
        except Exception as error:
            self._queue.put_nowait(error)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(ClientLeft())
