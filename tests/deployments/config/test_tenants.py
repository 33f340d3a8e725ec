"""Keys to tenants."""

from __future__ import annotations

import pytest

from deployments.config.api_config import ApiKey
from deployments.config.tenants import Tenants, hash_key, is_loopback
from rapid.errors import Unauthorized

KEYS = (ApiKey(tenant="acme", sha256=hash_key("sk-1")), ApiKey(tenant="zoo", sha256=hash_key("é")))


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [("Bearer sk-1", "acme"), ("bearer  sk-1 ", "acme"), ("Bearer é", "zoo")],
)
def test_a_key_speaks_for_its_tenant(authorization, tenant):
    assert Tenants(KEYS).identify(authorization, "10.0.0.7", "example.org").tenant == tenant


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Basic sk-1", "sk-1", "Bearer sk-12"]
)
def test_anything_else_speaks_for_nobody(authorization):
    with pytest.raises(Unauthorized):
        Tenants(KEYS).identify(authorization, "127.0.0.1", "localhost")


def test_the_hash_is_no_key():
    with pytest.raises(Unauthorized):
        Tenants(KEYS).identify(f"Bearer {hash_key('sk-1')}", "127.0.0.1", "localhost")


@pytest.mark.parametrize(
    ("client", "host"),
    [("127.0.0.1", "127.0.0.1:8000"), ("::1", "[::1]:8000"), (None, "localhost"), ("::1", None)],
)
def test_without_keys_this_machine_is_local(client, host):
    assert Tenants().identify(None, client, host).tenant == "local"
    assert Tenants().identify("Bearer whatever", client, host).tenant == "local"


@pytest.mark.parametrize(
    ("client", "host"),
    [("10.0.0.7", "localhost"), ("127.0.0.1", "evil.example"), ("127.0.0.1", "10.0.0.1:8000")],
)
def test_without_keys_others_are_nobody(client, host):
    with pytest.raises(Unauthorized, match=r"api\.keys"):
        Tenants().identify(None, client, host)


def test_whoever_comes_through_a_proxy_needs_a_key():
    with pytest.raises(Unauthorized, match=r"api\.keys"):
        Tenants().identify(None, "127.0.0.1", "127.0.0.1:8000", is_forwarded=True)
    assert Tenants(KEYS).identify("Bearer sk-1", "127.0.0.1", "localhost", is_forwarded=True)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.1", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_loopback(host, is_local):
    assert is_loopback(host) is is_local


@pytest.mark.parametrize(
    ("authorization", "is_operator"), [("Bearer op", True), ("Bearer sk-1", False)]
)
def test_an_operator_is_known_by_the_key(authorization, is_operator):
    keys = (*KEYS, ApiKey(tenant="ops", sha256=hash_key("op"), operator=True))
    caller = Tenants(keys).identify(authorization, "127.0.0.1", "localhost")
    assert ("admin" in caller.scopes) == is_operator
    assert {"ask", "documents"} <= caller.scopes
    assert caller.key_id.startswith("configured-")


def test_without_keys_the_operator_is_whoever_is_on_this_machine():
    assert "admin" in Tenants().identify(None, "127.0.0.1", "localhost").scopes
