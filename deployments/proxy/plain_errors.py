"""The errors of Serve's proxy in OpenAI's form, and headers that callers may not set.

Where Serve has no replica's answer, it answers in plain text; where it lost the replica first, it
answers nothing, and uvicorn says "Internal Server Error".
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.http.error_responses import HttpError, error_body, http_error
from rapid.errors import Overloaded

# The first would set aside the operator's `request_timeout_s`; with the second a request would go
# on after its caller has left.
_OPERATORS_HEADERS = (b"x-request-timeout-seconds", b"x-request-disconnect-disabled")
_BUSY = http_error(Overloaded("The server is busy."))
_SERVES_OWN = {
    408: HttpError(
        408,
        error_body(
            "The request took longer than the server allows.", "server_error", code="timeout"
        ),
        {},
    ),
    429: _BUSY,
    503: _BUSY,
}
_HEALTH = "/-/healthz"  # of the proxy; its list of routes and applications is nobody's
_UNKNOWN_PATH = HttpError(
    404, error_body("There is no such path.", "invalid_request_error", code="not_found"), {}
)
_INGRESS_LOST = HttpError(
    503,
    error_body(
        "The process that had the request was lost: ask again.",
        "server_error",
        code="ingress_lost",
        is_retryable=True,
    ),
    {"retry-after": "1"},
)


class OpenAIErrors:
    """An ASGI application around Serve's, whose own errors it tells in OpenAI's form.

    Answers of replicas, and the proxy's own health, pass as they are; of what else Serve tells of
    itself under ``/-/`` nothing does.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        scope["headers"] = [each for each in scope["headers"] if each[0] not in _OPERATORS_HEADERS]
        is_of_system = scope["path"] == _HEALTH
        if scope["path"].startswith("/-/") and not is_of_system:
            await _tell(_UNKNOWN_PATH, scope, send)
            return
        has_started = is_replaced = False

        async def pass_on(message: Message) -> None:
            nonlocal has_started, is_replaced
            if not has_started:
                has_started = True
                error = None if is_of_system else _serves_own_error(message)
                if error is not None:
                    is_replaced = True
                    await _tell(error, scope, send)
            if not is_replaced:
                await send(message)

        try:
            await self._app(scope, receive, pass_on)
        except Exception as error:
            if not has_started:
                await _tell(http_error(error), scope, send)
            raise  # uvicorn closes the connection
        if not has_started:
            await _tell(_INGRESS_LOST, scope, send)


def _serves_own_error(start: Message) -> HttpError | None:
    """Return what to say in place of an error of Serve's own.

    That is plain text of unknown length; a replica's says its length.
    """
    headers = {name.lower(): value for name, value in start.get("headers", ())}
    is_serves = (
        headers.get(b"content-type", b"").startswith(b"text/plain")
        and b"content-length" not in headers
    )
    return _SERVES_OWN.get(start["status"]) if is_serves else None


async def _tell(error: HttpError, scope: Scope, send: Send) -> None:
    """Answer with an error under the request's id, which Serve has added to its headers."""
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    headers += _request_id(scope["headers"])
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [each for each in headers if each[0] == b"x-request-id"][:1]
