"""Authentication: who sent a request, from API keys that are known only by their hashes."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING

from library.accounts.callers import SCOPES, Caller, hash_key
from rapid.errors import Unauthorized

if TYPE_CHECKING:
    from deployments.config.api_config import ApiKey

LOCAL_TENANT = "local"
LOCAL = Caller(LOCAL_TENANT, "local", frozenset(SCOPES))


class Tenants:
    """A table of API keys that identifies the caller of a request.

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

    @property
    def has_keys(self) -> bool:
        """Whether a request needs a key of the table, or of another place."""
        return self._keys is not None

    def identify(
        self,
        authorization: str | None,
        client: str | None,
        host: str | None,
        *,
        is_forwarded: bool = False,
    ) -> Caller:
        """Return who sent a request.

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
                return LOCAL
            raise Unauthorized(
                "This server has no API keys, so it answers on this machine only: configure "
                "api.keys to let others in."
            )
        found = _find(key_in(authorization), self._keys)
        scopes = frozenset(each for each in SCOPES if found.operator or each != "admin")
        return Caller(found.tenant, f"configured-{found.sha256[:8]}", scopes)


def key_in(authorization: str | None) -> str | None:
    """Return the key in an Authorization header; None where there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    return (scheme.lower() == "bearer" and key.strip()) or None


def refusal_of(key: str | None) -> Unauthorized:
    """Return the refusal of a request with this key, or without one."""
    return Unauthorized(
        "You did not provide an API key: send it as 'Authorization: Bearer KEY'."
        if key is None
        else "Incorrect API key provided."
    )


def _find(key: str | None, keys: Sequence[ApiKey]) -> ApiKey:
    if key is None:
        raise refusal_of(key)
    presented = hash_key(key)
    # Every key is compared in constant time, so that timing reveals nothing about the keys.
    found = [each for each in keys if hmac.compare_digest(each.sha256, presented)]
    if not found:
        raise refusal_of(key)
    return found[0]


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
