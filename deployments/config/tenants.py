"""Authentication: the tenant of a request, from API keys that are known only by their hashes."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from rapid.errors import Unauthorized

if TYPE_CHECKING:
    from deployments.config.api_config import ApiKey

LOCAL_TENANT = "local"


class Tenants:
    """A table of API keys that identifies the tenant of a request.

    Without keys the one tenant is `local`, and it is served on this machine only: requests from
    elsewhere are refused, and so are requests for another host name, which is how a web page in a
    browser on this machine would reach the server (DNS rebinding).
    """

    def __init__(self, keys: Sequence[ApiKey] | None = None) -> None:
        """Create the table.

        Args:
            keys: The keys that are accepted now, perhaps none; None for a server without keys.
        """
        self._keys = None if keys is None else tuple(keys)

    def identify(
        self,
        authorization: str | None,
        client: str | None,
        host: str | None,
        *,
        is_forwarded: bool = False,
    ) -> str:
        """Return the tenant of a request.

        Args:
            authorization: The Authorization header.
            client: The peer's address; None for a local socket.
            host: The Host header.
            is_forwarded: Whether a proxy forwarded the request, whose origin may be anywhere.

        Raises:
            Unauthorized: If the key is missing or unknown, or if no keys are configured and the
                request does not come from this machine.
        """
        if self._keys is None:
            is_here = (client is None or is_loopback(client)) and is_loopback(_hostname(host))
            if is_here and not is_forwarded:
                return LOCAL_TENANT
            raise Unauthorized(
                "This server has no API keys, so it answers on this machine only: configure "
                "api.keys to let others in."
            )
        return _key_of(authorization, self._keys).tenant

    def is_operator(
        self,
        authorization: str | None,
        client: str | None,
        host: str | None,
        *,
        is_forwarded: bool = False,
    ) -> bool:
        """Return whether a request may see the state of the whole application.

        That is one with an operator's key, or without configured keys one from this machine. The
        arguments are those of `identify`.

        Raises:
            Unauthorized: If the request has a key that is unknown.
        """
        if self._keys is not None:
            return authorization is not None and _key_of(authorization, self._keys).operator
        try:
            self.identify(authorization, client, host, is_forwarded=is_forwarded)
        except Unauthorized:
            return False
        return True


def _key_of(authorization: str | None, keys: Sequence[ApiKey]) -> ApiKey:
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized(
            "You did not provide an API key: send it as 'Authorization: Bearer KEY'."
        )
    presented = hash_key(key.strip())
    # Every key is compared in constant time, so that timing reveals nothing about the keys.
    found = [key for key in keys if hmac.compare_digest(key.sha256, presented)]
    if not found:
        raise Unauthorized("Incorrect API key provided.")
    return found[0]


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key in hex, which the configuration stores in place of the key."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback name or address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _hostname(host: str | None) -> str:
    """Return the Host header without its port; a missing header counts as localhost."""
    if host is None:
        return "localhost"
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
