"""uvicorn's HTTP server with limits on the head of a request, which has none of its own.

The parser joins a header's value from its pieces, so that an endless one costs time that grows with
the square of its length, and stops everybody whom the process serves.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from deployments.api.http.error_responses import error_body
from deployments.proxy.plain_errors import OpenAIErrors
from deployments.proxy.ready_in_time import ReadyInTime

MAX_HEAD_BYTES = 64 * 1024  # as uvicorn's other HTTP server, h11
MAX_HEADERS = 100  # as in Apache
HEAD_S = 10.0  # in which a request's head must come

_TOO_LONG = f"The head of the request is longer than {MAX_HEAD_BYTES} bytes."
_TOO_MANY = f"The request has more than {MAX_HEADERS} headers."
_TOO_SLOW = f"The head of the request did not come within {HEAD_S:g} seconds."


class HttpWithLimits(HttpToolsProtocol):
    """One connection, which is closed when the head of a request is too long or too slow.

    A head is the request line and the headers. What comes beside a body's bytes, such as trailers,
    has the same limits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = OpenAIErrors(ReadyInTime(self.app))
        self._num_bytes = 0  # received since the parser last passed something on
        self._has_begun = False  # a head, which has not ended yet
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: tuple[int, str] | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, _TOO_LONG)
        has_answered = self.cycle is not None and self.cycle.response_complete
        if has_answered and self._deadline is None and not self.transport.is_closing():
            self._expect_head()  # uvicorn waits no longer, also where these bytes begin nothing

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        if self._deadline is None:
            self._expect_head()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) == MAX_HEADERS:
            self._stop_parsing(431, _TOO_MANY)
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        self._num_bytes = 0
        self._has_begun = False
        self._stop_waiting()
        # A head that came in one piece is complete before its bytes have been counted.
        if len(self.url) + sum(len(n) + len(v) for n, v in self.headers) > MAX_HEAD_BYTES:
            self._stop_parsing(431, _TOO_LONG)
        super().on_headers_complete()

    @override
    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._refusal or (400, msg)))

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self._end_wait)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_wait(self) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering():  # the head of the next request, which is not read until then
            self._expect_head()
        elif self._has_begun:
            self._refuse(408, _TOO_SLOW)
        else:
            self.transport.close()

    def _stop_parsing(self, status: int, message: str) -> None:
        """Leave the parser, of whose errors `data_received` makes calls of `send_400_response`."""
        self._refusal = status, message
        raise ValueError(message)

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless an answer is under way, and close the connection."""
        if not self._is_answering():
            body = json.dumps(error_body(message, is_retryable=status == 408)).encode()
            head = [*self.server_state.default_headers, (b"content-type", b"application/json")]
            head += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            lines = [b"%b: %b\r\n" % header for header in head]
            self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete
