"""Serve's proxy speaks OpenAI's language, and callers do not set the operator's limits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from ray.serve._private.http_util import RequestIdMiddleware, convert_object_to_asgi_messages
from starlette.responses import PlainTextResponse

from deployments.proxy.plain_errors import OpenAIErrors


async def ask(app: Any, path: str = "/v1/chat", **headers: str) -> httpx.Response:
    """The answer of an application behind the same two layers as Serve's proxy."""
    whole = OpenAIErrors(RequestIdMiddleware(app))
    transport = httpx.ASGITransport(whole, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return await http.get(path, headers=given)


def serve_says(status: int) -> Any:
    """Serve's proxy, which has an error of its own to tell."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in convert_object_to_asgi_messages("Request timed out.", status_code=status):
            await send(message)

    return app


async def says_nothing(scope: Any, receive: Any, send: Any) -> None:
    """Serve's proxy, which has lost the replica."""


@pytest.mark.parametrize(
    ("app", "status", "code", "wait"),
    [
        (serve_says(408), 408, "timeout", None),
        (serve_says(503), 503, "overloaded", "1"),
        (says_nothing, 503, "ingress_lost", "1"),
    ],
)
async def test_serves_own_errors_have_openais_form(
    app: Any, status: int, code: str, wait: str | None
) -> None:
    reply = await ask(app, x_request_id="mine")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code)
    assert error["retryable"] == (wait is not None)
    assert reply.headers.get("retry-after") == wait
    assert reply.headers.get_list("x-request-id") == ["mine"]


async def test_a_mistake_of_serves_is_told_without_its_details() -> None:
    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("/a/path")

    reply = await ask(breaks)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "/a/path" not in reply.text


async def test_answers_of_replicas_and_about_serve_itself_stay_as_they_are() -> None:
    reply = await ask(PlainTextResponse("of another application", 503))
    assert (reply.status_code, reply.text) == (503, "of another application")
    reply = await ask(serve_says(503), path="/-/healthz")
    assert (reply.status_code, reply.text) == (503, "Request timed out.")


@pytest.mark.parametrize("path", ["/-/routes", "/-/", "/-/healthz/", "/-/anything"])
async def test_serve_tells_nobody_which_applications_there_are(path: str) -> None:
    reply = await ask(PlainTextResponse('{"/": "rapid"}'), path=path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert "rapid" not in reply.text


async def test_callers_do_not_set_the_operators_timeout() -> None:
    seen: dict[bytes, bytes] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope["headers"])
        await PlainTextResponse("fine")(scope, receive, send)

    await ask(
        app, X_Request_Timeout_Seconds="-1", x_request_disconnect_disabled="?1", x_other="kept"
    )
    assert b"x-other" in seen
    assert not {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"} & seen.keys()
