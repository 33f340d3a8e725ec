"""The limits find their place in Ray Serve's own server, whose parts are private."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from ray.serve._private import http_util
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse

from cluster import serve_internals
from deployments import app
from deployments.config.serve_file import check
from deployments.proxy import server_limits
from rapid.errors import ConfigurationError
from tests.deployments.proxy.test_http_limits import HEAD, answer
from tests.ports import free_port

TOO_LONG = HEAD + b"x: " + b"a" * 100_000 + b"\r\n\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


@asynccontextmanager
async def serves_server(starting_up: Callable[[Any], None] = lambda _: None) -> AsyncIterator[Any]:
    """The task that starts Serve's server of a proxy as a proxy does, and that server's address.

    Args:
        starting_up: Is called with the task before the server has begun to listen.
    """
    loop = asyncio.get_running_loop()
    address = ("127.0.0.1", free_port())
    options = HTTPOptions(host=address[0], port=address[1])
    options = http_util.configure_http_options_with_defaults(options)
    starting = asyncio.ensure_future(
        http_util.start_asgi_http_server(hello, options, event_loop=loop)
    )
    starting_up(starting)
    running, server = await starting
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.005)
    try:
        yield starting, address
    finally:
        server.should_exit = True
        await running


def limit(starting: Any) -> None:
    server_limits.limit_proxy(SimpleNamespace(_start_http_server_task=starting))


async def test_a_proxy_that_runs_gets_the_limits_and_closes_what_came_before() -> None:
    async with serves_server() as (starting, address):
        early, writer = await asyncio.open_connection(*address)
        while not starting.result()[1].server_state.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        limit(starting)
        assert await early.read() == b""
        writer.close()
        status, body = await answer(address, TOO_LONG)
    assert (status, body["error"]["type"]) == (431, "invalid_request_error")


async def test_a_proxy_that_is_starting_gets_the_limits() -> None:
    async with serves_server(limit) as (_, address):
        assert (await answer(address, TOO_LONG))[0] == 431


async def test_a_replica_with_a_server_of_its_own_has_the_limits_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    default = uvicorn.config.HTTP_PROTOCOLS["auto"]
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", default)  # put back after the test
    server_limits.limit_replica()
    assert uvicorn.config.HTTP_PROTOCOLS["auto"] == default
    monkeypatch.setattr(serve_internals, "RAY_SERVE_ENABLE_DIRECT_INGRESS", True)
    server_limits.limit_replica()
    async with serves_server() as (_, address):
        assert (await answer(address, TOO_LONG))[0] == 431


def test_an_actor_that_is_no_proxy_is_left_alone() -> None:
    server_limits.limit_proxy(object())  # any other actor with a handle of the ingress


def test_the_ingress_has_our_router_where_serve_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    options = app.compose(check("serve_config.yaml"))._bound_deployment._deployment_config
    router = options.request_router_config.get_request_router_class()
    assert router.__name__ == "IngressRouter"
    monkeypatch.setattr(serve_internals, "RAY_SERVE_ENABLE_HA_PROXY", True)
    behind = app.compose(check("serve_config.yaml"))._bound_deployment._deployment_config
    assert behind.request_router_config.is_default_request_router()


@pytest.mark.parametrize(("is_direct", "has_keys"), [(False, False), (True, True)])
def test_an_application_is_served_where_its_callers_are_known(
    monkeypatch: pytest.MonkeyPatch, is_direct: bool, has_keys: bool
) -> None:
    monkeypatch.setattr(serve_internals, "RAY_SERVE_ENABLE_DIRECT_INGRESS", is_direct)
    server_limits.check_callers_are_known(has_keys=has_keys)


def test_an_application_without_keys_is_refused_where_every_caller_seems_local(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_internals, "RAY_SERVE_ENABLE_DIRECT_INGRESS", True)
    with pytest.raises(ConfigurationError, match=r"list keys .* or start Ray"):
        server_limits.check_callers_are_known(has_keys=False)
