"""Serve's proxy, once it has routed for an ingress with `IngressRouter`: limits and errors."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from deployments.proxy.server_limits import router_options

pytestmark = pytest.mark.ray


class Fragile:
    """An ingress that says which headers it got, or dies of a request."""

    async def __call__(self, request: Any) -> Any:
        if request.url.path.endswith("/die"):
            os._exit(1)
        return sorted(request.headers)


@pytest.fixture(scope="module")
def fragile(ray_cluster: str) -> Iterator[str]:
    """The address of a fragile application with our router."""
    from ray import serve

    deployment = serve.deployment(Fragile, **router_options())
    serve.run(deployment.bind(), name="fragile", route_prefix="/fragile")
    yield f"{ray_cluster}/fragile"
    serve.delete("fragile")


def test_an_endless_header_ends_its_own_connection(fragile: str) -> None:
    address = urlsplit(fragile)
    with socket.create_connection((address.hostname, address.port), timeout=60) as line:
        with suppress(ConnectionError):
            line.sendall(b"GET /fragile HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 2**20)
        with suppress(ConnectionError):
            while line.recv(4096):  # until the proxy closes
                pass
    assert httpx.get(f"{fragile}/again").status_code == 200


def test_a_crowd_of_headers_is_refused(fragile: str) -> None:
    reply = httpx.get(fragile, headers={f"x-{number}": "1" for number in range(100)})
    assert (reply.status_code, reply.json()["error"]["type"]) == (431, "invalid_request_error")


def test_callers_do_not_set_the_operators_timeout(fragile: str) -> None:
    reply = httpx.get(f"{fragile}/now", headers={"x-request-timeout-seconds": "0.000001"})
    assert reply.status_code == 200
    assert "x-request-timeout-seconds" not in reply.json()


def test_a_lost_replica_is_told_in_openais_form(fragile: str) -> None:
    reply = httpx.get(f"{fragile}/die", headers={"x-request-id": "mine"}, timeout=60)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["code"] == "ingress_lost"
    assert reply.headers["x-request-id"] == "mine"
