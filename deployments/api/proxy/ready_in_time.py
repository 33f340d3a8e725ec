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
        has_begun = is_over = False

        async def pass_on(message: Message) -> None:
            nonlocal has_begun, is_over
            is_over = is_over or (not has_begun and _is_serves_own(message))
            if not is_over:
                has_begun = True
                await send(message)

        answer = asyncio.ensure_future(self._app(scope, receive, pass_on))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({answer}, timeout=self._deadline_s)
            if has_begun:
                await answer
                return
            is_over = True
        finally:
            answer.cancel()
        state = {"ready": False, "answered": False, "reason": "no ingress answers"}
        await JSONResponse(state, 503, headers={"retry-after": "1"})(scope, receive, send)


def _is_serves_own(start: Message) -> bool:
    """Return whether an error begins that is Serve's own, in plain text."""
    headers = dict(start["headers"])
    is_json = headers.get(b"content-type", b"").startswith(b"application/json")
    return start["status"] >= 500 and not is_json
