"""Responses of server-sent events, each of which says from where a client can continue.

Many clients are no parsers of server-sent events: they split at blank lines, or cut `data: ` off
each line, and take all the rest for JSON. So an event is one line of data, its id is a field of the
JSON, and what fills silence is an empty block, unless the client asks for comments.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.backend.continuing import Cursor
from deployments.api.chat.wire import Json
from deployments.api.http.error_responses import HttpError
from deployments.api.http.event_feed import ClientLeft
from rapid.messages import Reading

_log = logging.getLogger(__name__)


class EventStream(Response):
    """A response of server-sent events that closes its event feed however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[Json | str],
        place: Cursor,
        says_progress: bool,
        stack: AsyncExitStack,
        request_id: str,
        failure: Callable[[Exception, str], HttpError],
    ) -> None:
        """Create the response.

        Args:
            chunks: The chunks and, as strings, the comments.
            place: The place before the first chunk.
            says_progress: Whether comments are sent as such; else as empty lines.
            stack: What is closed when the stream ends.
            request_id: The id of the request, for the log.
            failure: Logs an error under that id and returns what the client is told.
        """
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._chunks, self._place, self._says_progress = chunks, place, says_progress
        self._stack, self._request_id = stack, request_id
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks as they arrive."""
        async with self._stack:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            try:
                await _send(send, start)
                await self._send_events(send)
                await _send(send, _body(b"", is_last=True))
            except ClientLeft:
                _log.info("request %s: the caller left", self._request_id)

    async def _send_events(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                if isinstance(chunk, str):
                    comment = f": {chunk}" if self._says_progress else ""
                    await _send(send, _body(f"{comment}\n\n".encode()))
                    continue
                self._place = self._place.after(chunk)
                named = chunk | {"rapid_event_id": self._place.event_id}
                await _send(send, _body(_event(named)))
            await _send(send, _body(b"data: [DONE]\n\n"))
        except ClientLeft:
            raise
        except Exception as error:
            failure = self._failure(error, self._request_id)
            await _send(send, _body(_event(failure.body)))


def progress_comment(event: Reading) -> str:
    """Return what a comment says of progress; a client may read it, as `rapid ask` does."""
    if event.unit == "tokens":
        return f"reading {event.num_read} of {event.num_all} tokens"
    of = f" {event.num_read:,} of {event.num_all:,}" if event.num_all else ""
    return f"embedding passages{of}"


async def _send(send: Send, message: MutableMapping[str, Any]) -> None:
    """Send a message; only here does an OSError mean that the client's connection is lost."""
    try:
        await send(message)
    except OSError as error:
        raise ClientLeft from error


def _body(part: bytes, *, is_last: bool = False) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": not is_last}


def _event(body: Json) -> bytes:
    """Return one event, in ASCII because some clients take U+2028 for the end of a line."""
    return b"data: %s\n\n" % json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
