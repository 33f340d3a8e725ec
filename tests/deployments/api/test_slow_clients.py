"""Clients that send their bodies slowly, or ones that nobody wants, through a real server."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from deployments.api.dialects.chat import parsing
from deployments.api.http.bodies import BodyPace
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from tests.deployments.scripted import ScriptedOrchestrator
from tests.deployments.serving import served

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
KEYS = tuple(ApiKey(tenant=name, sha256=hash_key(f"sk-{name}")) for name in ("crowd", "guest"))
JSON = {"content-type": "application/json"}


def ingress(pace: BodyPace, **config: Any) -> Ingress:
    return Ingress(ScriptedOrchestrator(), ApiConfig(model="m", **config), pace=pace)


@asynccontextmanager
async def begun(url: str, key: str, path: str = CHAT) -> AsyncIterator[asyncio.StreamReader]:
    """A connection that has sent the head of a request and one byte of its body."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: 500\r\n\r\n{{".encode())
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def reply(reader: asyncio.StreamReader) -> tuple[int, str, dict[str, Any]]:
    """Return status, head and body of a response after which the connection is closed."""
    head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), json.loads(body)


class TestSlowBodies:
    async def test_many_of_a_tenant_stop_neither_the_others_nor_its_own_quick_ones(self) -> None:
        app = ingress(BodyPace(quick_s=0.05, patience_s=30.0, drain_s=0.05), keys=KEYS)
        async with (
            served(app) as url,
            httpx.AsyncClient(base_url=url, timeout=30) as http,
            AsyncExitStack() as crowd,
        ):
            for _ in range(250):
                await crowd.enter_async_context(begun(url, "sk-crowd"))
            for path in ("/ready", "/health"):
                assert (await http.get(path)).status_code == 200
            for key in ("sk-guest", "sk-crowd"):
                for _ in range(100):  # those of the crowd may be the half that is refused
                    headers = {"authorization": f"Bearer {key}"}
                    response = await http.post(CHAT, json=ASK, headers=headers)
                    if response.status_code == 200:
                        break
                    assert key == "sk-crowd"
                else:
                    pytest.fail(f"{key} is never let in")

    async def test_one_that_does_not_go_on_is_told_so_and_its_connection_closed(self) -> None:
        app = ingress(BodyPace(quick_s=0.01, patience_s=0.05, drain_s=0.05))
        async with served(app) as url, begun(url, "local") as connection:
            status, head, body = await reply(connection)
        assert status == 408
        assert "connection: close" in head
        assert body["error"]["code"] == "request_timeout"
        assert body["error"]["retryable"] is True

    @pytest.mark.parametrize(
        ("key", "path", "status"),
        [("sk-nobody", CHAT, 401), ("sk-crowd", "/v1/files", 404), ("sk-crowd", "/ready", 405)],
    )
    async def test_a_refusal_does_not_wait_for_the_body(
        self, key: str, path: str, status: int
    ) -> None:
        app = ingress(BodyPace(patience_s=1000.0, longest_s=1000.0, drain_s=0.05), keys=KEYS)
        async with served(app) as url, begun(url, key, path) as connection:
            said, head, body = await reply(connection)
        assert said == status
        assert "connection: close" in head
        assert body["error"]["type"] in ("authentication_error", "invalid_request_error")

    async def test_a_refusal_whose_body_has_come_keeps_the_connection(self) -> None:
        async with served(ingress(BodyPace())) as url, httpx.AsyncClient(base_url=url) as http:
            response = await http.post(CHAT, json=ASK | {"n": 0})
        assert response.status_code == 400
        assert "connection" not in response.headers


class TestEncodings:
    async def test_a_compressed_body_names_its_header(self) -> None:
        async with served(ingress(BodyPace())) as url, httpx.AsyncClient(base_url=url) as http:
            body = gzip.compress(json.dumps(ASK).encode())
            response = await http.post(
                CHAT, content=body, headers=JSON | {"content-encoding": "gzip"}
            )
        assert response.status_code == 415
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("Content-Encoding", "unsupported_encoding")

    async def test_a_byte_order_mark_is_passed_over(self) -> None:
        async with served(ingress(BodyPace())) as url, httpx.AsyncClient(base_url=url) as http:
            body = b"\xef\xbb\xbf" + json.dumps(ASK).encode()
            assert (await http.post(CHAT, content=body, headers=JSON)).status_code == 200


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_long_body_is_parsed_beside_the_event_loop(
    is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    parse = parsing.parse_chat_request

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*given)

    monkeypatch.setattr(parsing, "parse_chat_request", watched)
    body = ASK | {"user": "x" * (300_000 if is_long else 3)}
    async with served(ingress(BodyPace())) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.post(CHAT, json=body)).status_code == 200
    assert [each is threading.main_thread() for each in threads] == [not is_long]
