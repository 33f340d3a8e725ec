"""Who calls: a tenant, by a key that may be used for some things."""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from hashlib import sha256
from typing import Literal, NamedTuple, get_args

Scope = Literal["ask", "documents", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

TENANT: ContextVar[str | None] = ContextVar("TENANT", default=None)
"""The tenant whose request is being served, or whose file is worked on, for its log lines."""


class Caller(NamedTuple):
    """The holder of a key.

    Attributes:
        key_id: The key's id, which is no secret.
        scopes: What the key may be used for.
    """

    tenant: str
    key_id: str
    scopes: frozenset[str]

    @property
    def actor(self) -> str:
        """The caller's name in the audit log."""
        return f"{self.tenant}/{self.key_id}"


def make_key() -> str:
    """Return a new key, which nobody can guess."""
    return f"sk-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """Return the SHA-256 of a key in hex, which is stored in place of the key."""
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
