"""Responses in the background: they are answered whether or not their callers are still there.

The ingress that takes a request answers it in a task of its own, which holds the request's place
and its streams, and says in the row of the response how far it is, once a second. Other ingresses
read the row. An ingress that is told to stop waits for its answers; if Serve ends it before that,
their rows say that it was lost (`library.responses.running_responses`).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

from starlette.responses import JSONResponse, Response

from deployments.api.dialects.responses.body.input_items import Json
from deployments.api.dialects.responses.growing_response import LAST_EVENTS
from deployments.api.dialects.responses.remembering import Memory
from deployments.api.dialects.responses.responses_reply import ResponsesReply
from deployments.api.http.dialect import Events
from deployments.api.http.error_responses import http_error
from deployments.api.http.event_feed import EventFeed
from deployments.api.http.event_stream import EventStream, frame_event
from library.accounts.callers import TENANT
from library.library_access import LibraryAccess

_log = logging.getLogger(__name__)

_TURN_S = 1.0  # between two renewals: who reads elsewhere is that far behind
_SILENCE = b"\n\n"


class RunningAnswer:
    """A response that is being answered here.

    Attributes:
        reply: Its renderer.
        task: What answers it.
        saved: The status and the number of steps that its row has.
        is_cancelled: Whether it is given up because its caller wants it no more.
    """

    task: asyncio.Task[None]

    def __init__(self, reply: ResponsesReply) -> None:
        self.reply = reply
        self.saved = ("queued", 0)
        self.is_cancelled = False
        self._told: list[bytes] = []
        self._has_last = self._has_ended = False
        self._more = asyncio.Event()

    async def tell(self, *events: Json) -> None:
        """Let those who follow have more events."""
        for event in events:
            self._told.append(await self.reply.render_event(event))
            self._has_last = event["type"] in LAST_EVENTS
        self._wake()

    def give_up(self, *, is_cancelled: bool = False) -> None:
        """Stop to answer, unless what was answered is being kept."""
        if not self.reply.is_ending:
            self.reply.is_ending, self.is_cancelled = True, is_cancelled
            self.task.cancel()

    async def end(self) -> None:
        """Let those who follow go, with a last event however the answer ended."""
        try:
            if not self._has_last:
                await self.tell(*self.reply.lose())
        finally:
            self._has_ended = True
            self._wake()

    def _wake(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()

    async def follow(self, after: int, silence_s: float) -> AsyncIterator[bytes]:
        """Yield the events after one of them, and empty lines in silence of so many seconds."""
        place = after + 1
        while True:
            told = self._told[place:]
            for event in told:
                yield event
            place += len(told)
            if self._told[place:]:
                continue
            if self._has_ended:
                return
            try:
                async with asyncio.timeout(silence_s):
                    await self._more.wait()
            except TimeoutError:
                yield _SILENCE


async def tell_error(error: Exception) -> bytes:
    """Return the event that ends a stream which cannot go on; the response itself may."""
    told = http_error(error).body["error"]
    names = ("code", "message", "param")
    return frame_event(
        {"type": "error", "sequence_number": 0} | {name: told[name] for name in names}
    )


class BackgroundAnswers:
    """The responses in the background of one ingress."""

    def __init__(self, library: LibraryAccess | None, silence_s: Callable[[], float]) -> None:
        """Answer nothing yet.

        Args:
            library: Where responses are kept; None for a server that keeps none, and has none here.
            silence_s: Returns the seconds without an event after which a stream has an empty line.
        """
        self._memory, self._silence_s = Memory(library), silence_s
        self._running: dict[str, RunningAnswer] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def answer(
        self,
        tenant: str,
        reply: ResponsesReply,
        feed: EventFeed,
        places: Callable[[Events], Events],
        stack: AsyncExitStack,
        fail: Callable[[Exception], Json],
    ) -> Response:
        """Keep a response and begin to answer it; return the HTTP response, which does not wait.

        Args:
            tenant: Who asks.
            reply: The renderer.
            feed: The events, which are not begun yet.
            places: Adds to events where their passages stand.
            stack: What is left when the answer ends; it is taken over once the response is kept.
            fail: Notes an error, and returns the body of its refusal.

        Raises:
            BadRequest: The tenant has too much.
            LibraryUnavailable: The response cannot be kept.
        """
        told = await reply.queue()
        queued = JSONResponse(told[-1]["response"])
        running = self._running[reply.id] = RunningAnswer(reply)
        await running.tell(*told)
        # An empty context: Serve cancels calls that are made in that of a request with the request.
        context = contextvars.Context()
        context.run(TENANT.set, tenant)
        work = self._run(running, feed, places, stack.pop_all(), fail)
        running.task = asyncio.create_task(work, context=context)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), context=contextvars.Context())
        if not reply.body.stream:
            return queued
        events = running.follow(-1, self._silence_s())
        return EventStream(events, reply.media_type, AsyncExitStack(), reply.id, tell_error)

    async def _run(
        self,
        running: RunningAnswer,
        feed: EventFeed,
        places: Callable[[Events], Events],
        stack: AsyncExitStack,
        fail: Callable[[Exception], Json],
    ) -> None:
        reply = running.reply
        try:
            async with stack:
                try:
                    async with feed:
                        events = places(await feed.begin(self._silence_s()))
                        async for event in reply.tell(events):
                            if event is not None:
                                await running.tell(event)
                except Exception as error:
                    await running.tell(*await reply.fail(fail(error)))
        except asyncio.CancelledError:
            if running.is_cancelled:
                await running.tell(*reply.cancel())
            raise
        finally:
            del self._running[reply.id]
            await running.end()

    async def _renew(self) -> None:
        """Hold the leases of all answers as long as there are any."""
        while self._running:
            await asyncio.sleep(_TURN_S)
            try:
                await self._save(*self._running.values())
            except Exception as error:  # the library is away, and the leases may outlast that
                _log.warning("leases of responses are not renewed: %s", type(error).__name__)

    async def _save(self, *answers: RunningAnswer) -> None:
        """Write how far answers are, and give up those that are not this ingress's any more."""
        ours = [each for each in answers if not each.reply.is_ending]
        if not ours:
            return
        grown = {each: each.reply.growth for each in ours}
        state = {each: (one.response["status"], len(one.steps)) for each, one in grown.items()}
        new = [one for each, one in grown.items() if state[each] != each.saved]
        held = await self._memory.renew([each.reply.id for each in ours], new)
        for each in ours:
            each.saved = state[each]
            if each.reply.id not in held:
                each.give_up(is_cancelled=await self._memory.is_cancelled(grown[each]))

    def follow(self, response_id: str, after: int) -> AsyncIterator[bytes] | None:
        """Return the events of a response after one of them; None if it is not answered here."""
        running = self._running.get(response_id)
        return None if running is None else running.follow(after, self._silence_s())

    async def save(self, response_id: str) -> None:
        """Write how far a response is, if it is answered here; errors are those of a library."""
        if (running := self._running.get(response_id)) is not None:
            await self._save(running)

    def stop(self, response_id: str, *, is_deleted: bool = False) -> None:
        """Stop to answer a response that was cancelled or deleted, if it is answered here."""
        running = self._running.get(response_id)
        if running is not None:
            running.give_up(is_cancelled=not is_deleted)

    async def finish(self) -> None:
        """Wait until all that is being answered has ended."""
        while self._running:
            await asyncio.wait([each.task for each in self._running.values()])
        if self._renewing is not None:
            await asyncio.wait([self._renewing])
