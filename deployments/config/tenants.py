"""Who is asking: API keys, known by their hashes only, to tenants."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from hashlib import sha256
from typing import Protocol

from rapid.errors import Unauthorized

LOCAL_TENANT = "local"


class KeyHash(Protocol):
    """A configured key."""

    @property
    def tenant(self) -> str:
        """Whom it speaks for."""
        ...

    @property
    def sha256(self) -> str:
        """Its hash in hex; the key itself is nowhere in the configuration."""
        ...


class Tenants:
    """Turns what a request presents into a tenant.

    Without keys there is one tenant, `local`, and it is served on this machine only: callers from
    elsewhere are refused, and so are requests for another host name, which is how a web page in a
    browser on this machine would reach the server (DNS rebinding).
    """

    def __init__(self, keys: Sequence[KeyHash] = ()) -> None:
        self._keys = tuple(keys)

    def identify(
        self,
        authorization: str | None,
        client: str | None,
        host: str | None,
        *,
        is_forwarded: bool = False,
    ) -> str:
        """The tenant of a request.

        Args:
            authorization: the header.
            client: the peer's address; None for a local socket.
            host: the Host header.
            is_forwarded: a proxy says that it speaks for someone else, who may be anywhere.

        Raises:
            Unauthorized: the key is missing or unknown, or there are no keys and this is no
                request from this machine.
        """
        if not self._keys:
            is_here = (client is None or is_loopback(client)) and is_loopback(_hostname(host))
            if is_here and not is_forwarded:
                return LOCAL_TENANT
            raise Unauthorized(
                "This server has no API keys, so it answers on this machine only: configure "
                "api.keys to let others in."
            )
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized(
                "You did not provide an API key: send it as 'Authorization: Bearer KEY'."
            )
        presented = hash_key(key.strip())
        # Every key is compared, so that the time says nothing about which one came close.
        tenants = [k.tenant for k in self._keys if hmac.compare_digest(k.sha256, presented)]
        if not tenants:
            raise Unauthorized("Incorrect API key provided.")
        return tenants[0]


def hash_key(key: str) -> str:
    """What the configuration stores of a key."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine and nothing else."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _hostname(host: str | None) -> str:
    """The Host header without its port."""
    if host is None:
        return "localhost"
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
