"""Web pages of the origins that are allowed may call the server, and no others."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from rapid.errors import EngineFailed
from tests.deployments.scripted import STARTED, ScriptedOrchestrator

PAGE = "https://chat.example.org"
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
KEY = {"tenant": "acme", "sha256": "0" * 64}
ASKING = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def client(*script: Any, origins: tuple[str, ...] = (PAGE,), **config: Any) -> httpx.AsyncClient:
    settings = ApiConfig(model="m", allowed_origins=origins, **config)
    app = Ingress(ScriptedOrchestrator(*script), settings)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


async def test_a_browser_that_asks_first_needs_no_key():
    reply = await client(keys=(KEY,)).options(CHAT, headers=ASKING)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == ASKING["access-control-request-headers"]
    assert "Origin" in reply.headers["vary"]
    assert "access-control-allow-credentials" not in reply.headers


async def test_pages_of_others_are_refused():
    asking = ASKING | {"origin": "https://elsewhere.example.org"}
    reply = await client().options(CHAT, headers=asking)
    assert (reply.status_code, reply.text) == (400, "Disallowed CORS origin")
    reply = await client().post(CHAT, json=ASK, headers={"origin": asking["origin"]})
    assert "access-control-allow-origin" not in reply.headers


async def test_nobody_is_allowed_who_is_not_named():
    http = client(origins=())
    reply = await http.options(CHAT, headers=ASKING)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    reply = await http.post(CHAT, json=ASK, headers={"origin": PAGE})
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("body", "config", "status"),
    [
        (ASK, {}, 200),
        (ASK | {"stream": True}, {}, 200),
        (ASK | {"n": "two"}, {}, 400),
        (ASK, {"keys": (KEY,)}, 401),
    ],
)
async def test_answers_streams_and_refusals_may_be_read(
    body: dict[str, Any], config: dict[str, Any], status: int
):
    reply = await client(**config).post(CHAT, json=body, headers={"origin": PAGE})
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "Origin" in reply.headers["vary"]
    shown = reply.headers["access-control-expose-headers"]
    assert {"x-request-id", "retry-after", "x-ratelimit-reset-tokens"} <= {*shown.split(", ")}


async def test_failures_and_unknown_routes_may_be_read_too():
    http = client(STARTED, EngineFailed("It broke."))
    for reply in (
        await http.post(CHAT, json=ASK, headers={"origin": PAGE}),
        await http.get("/v2", headers={"origin": PAGE}),
    ):
        assert reply.status_code in (404, 500)
        assert reply.headers["access-control-allow-origin"] == PAGE


async def test_origins_are_live():
    app = Ingress(ScriptedOrchestrator(), ApiConfig(model="m"))
    app.configure(ApiConfig(model="m", allowed_origins=(PAGE,)))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
    assert (await http.options(CHAT, headers=ASKING)).status_code == 200


@pytest.mark.parametrize("given", ["*", "https://*.example.org", f"{PAGE}/", "null", "HTTPS://a.b"])
def test_an_origin_is_named_exactly(given: str):
    with pytest.raises(ValidationError, match="write each as browsers"):
        ApiConfig(allowed_origins=(given,))
