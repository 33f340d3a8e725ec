"""`/ready` behind a proxy that waits for an ingress."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from deployments.proxy.ready_in_time import ReadyInTime


class Proxied:
    """Serve's application, which answers once it has somebody to ask."""

    def __init__(self) -> None:
        self.has_ingress = asyncio.Event()
        self.num_given_up = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.has_ingress.wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        await PlainTextResponse(scope["path"])(scope, receive, send)


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy")


@pytest.mark.parametrize("path", ["/ready", "/small/ready"])
async def test_without_an_ingress_the_proxy_says_that_it_is_not_ready(path: str) -> None:
    proxied = Proxied()
    async with client_of(ReadyInTime(proxied, deadline_s=0.01)) as http:
        answer = await http.get(path)
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "answered": False, "reason": "no ingress answers"}
    await asyncio.sleep(0)
    assert proxied.num_given_up == 2  # both times that it was asked


async def test_what_an_ingress_answers_and_other_routes_pass() -> None:
    proxied = Proxied()
    async with client_of(ReadyInTime(proxied, deadline_s=0.01)) as http:
        waiting = asyncio.create_task(http.get("/v1/models"))
        assert (await http.get("/ready")).status_code == 503
        proxied.has_ingress.set()
        assert (await waiting).text == "/v1/models"
        assert (await http.get("/ready")).text == "/ready"


async def test_what_serve_says_itself_is_no_answer_of_an_ingress() -> None:
    own = ReadyInTime(PlainTextResponse("Deployment is unavailable.", 503))
    ingress = ReadyInTime(JSONResponse({"ready": False}, 503))
    for app, state in ((own, False), (ingress, None)):
        async with client_of(app) as http:
            answer = await http.get("/ready")
        assert (answer.status_code, answer.json().get("answered")) == (503, state)


async def test_an_ingress_that_is_lost_is_one_that_does_not_answer() -> None:
    async def lost(scope: Any, receive: Any, send: Any) -> None:
        raise ConnectionError

    async with client_of(ReadyInTime(lost)) as http:
        assert (await http.get("/ready")).status_code == 503


async def test_where_one_ingress_hangs_another_is_asked() -> None:
    num_asked = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            await asyncio.Event().wait()
        await JSONResponse({"ready": True})(scope, receive, send)

    async with client_of(ReadyInTime(app, deadline_s=0.02)) as http:
        assert (await http.get("/ready")).json() == {"ready": True}
    assert num_asked == 2
