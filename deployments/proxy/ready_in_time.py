"""An answer to ``/ready`` also where no ingress gives one, from Serve's proxy.

Where a proxy has no replica to send a request to, it waits for one, without limit, or says so in
plain text: while all ingresses are replaced, or for ever once Ray has lost this node. Health checks
need an answer, and their readers a reason.
"""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DEADLINE_S = 4.0  # less than the 5 s of a container's health check


class ReadyInTime:
    """An ASGI application around Serve's, which answers ``/ready`` within `DEADLINE_S` seconds."""

    def __init__(self, app: ASGIApp, deadline_s: float = DEADLINE_S) -> None:
        self._app, self._deadline_s = app, deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not scope["path"].endswith("/ready"):
            await self._app(scope, receive, send)
            return
        attempts: list[asyncio.Future[None]] = []
        sending: int | None = None  # the attempt whose answer goes out

        def ask() -> None:
            number, is_over = len(attempts), False

            async def pass_on(message: Message) -> None:
                nonlocal sending, is_over
                is_over = is_over or (sending is None and _is_serves_own(message))
                if not is_over and sending in (None, number):
                    sending = number
                    await send(message)

            attempt = asyncio.ensure_future(self._app(dict(scope), receive, pass_on))
            attempt.add_done_callback(lambda done: done.cancelled() or done.exception())
            attempts.append(attempt)

        try:
            for _ in range(
                2
            ):  # an ingress that hangs is not the only one: Serve may choose another
                ask()
                waiting = [each for each in attempts if not each.done()]
                await asyncio.wait(
                    waiting, timeout=self._deadline_s / 2, return_when=asyncio.FIRST_COMPLETED
                )
                if sending is not None:
                    await attempts[sending]
                    return
            sending = len(attempts)  # none of them
        finally:
            for attempt in attempts:
                attempt.cancel()
        state = {"ready": False, "answered": False, "reason": "no ingress answers"}
        await JSONResponse(state, 503, headers={"retry-after": "1"})(scope, receive, send)


def _is_serves_own(start: Message) -> bool:
    """Return whether an error begins that is Serve's own, in plain text."""
    headers = dict(start["headers"])
    is_json = headers.get(b"content-type", b"").startswith(b"application/json")
    return start["status"] >= 500 and not is_json
