"""Responses that are sent as an answer grows."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.http.event_feed import ClientLeft

_log = logging.getLogger(__name__)


def frame_event(event: Mapping[str, Any]) -> bytes:
    """Return one event of a stream, in ASCII because some clients take U+2028 for a line's end."""
    data = json.dumps(event, separators=(",", ":"), allow_nan=False)
    return f"event: {event['type']}\ndata: {data}\n\n".encode()


class EventStream(Response):
    """A streamed response that closes its event feed however it ends."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        media_type: str,
        stack: AsyncExitStack,
        request_id: str,
        render_error: Callable[[Exception], Awaitable[bytes]],
    ) -> None:
        """Create the response.

        Args:
            chunks: The parts of the body.
            media_type: Of the body.
            stack: What is closed when the stream ends.
            request_id: The id of the request, for the log.
            render_error: Notes an error and returns the last part of a body that it ends.
        """
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type
        )
        del self.headers["content-length"]
        self._chunks, self._stack, self._request_id = chunks, stack, request_id
        self._render_error = render_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks as they arrive."""
        async with self._stack:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            try:
                await _send(send, start)
                await self._send_chunks(send)
                await _send(send, _body(b"", is_last=True))
            except ClientLeft:
                _log.info("request %s: the caller left", self._request_id)

    async def _send_chunks(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                await _send(send, _body(chunk))
        except ClientLeft:
            raise
        except Exception as error:
            await _send(send, _body(await self._render_error(error)))


async def _send(send: Send, message: MutableMapping[str, Any]) -> None:
    """Send a message; only here does an OSError mean that the client's connection is lost."""
    try:
        await send(message)
    except OSError as error:
        raise ClientLeft from error


def _body(part: bytes, *, is_last: bool = False) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": not is_last}
