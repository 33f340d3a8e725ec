"""The bodies of requests about accounts, validated strictly."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from library.accounts.callers import Scope
from rapid.requests.request_fields import Fields, Text, refuse

MAX_TENANT = 128  # characters, as of a configured key
_MOST = 2**53 - 1  # the largest whole number that JSON readers agree on
_LONGEST_GRACE_S = 30 * 86_400  # of a rotated key, in seconds


def _in_one_line(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        refuse("text", "must be one line of printable characters without spaces around it")
    return text


Name = Annotated[Text, Field(min_length=1, max_length=MAX_TENANT), AfterValidator(_in_one_line)]
Amount = Annotated[int, Field(ge=1, le=_MOST)]


class NewKey(Fields):
    """The body of ``POST /v1/admin/keys``."""

    tenant: Name
    name: Name | None = None
    scopes: Annotated[list[Scope], Field(min_length=1)] = Field(["ask", "documents"])
    expires_at: Annotated[int, Field(ge=0, le=_MOST)] | None = None


class Rotation(Fields):
    """The body of ``POST /v1/admin/keys/{id}/rotate``."""

    grace_seconds: int = Field(0, ge=0, le=_LONGEST_GRACE_S)


class ChangedLimits(Fields):
    """The body of ``POST /v1/admin/limits/{tenant}``; null leaves a limit to the configuration."""

    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    concurrent_answers: Amount | None = None
    long_prefills: Amount | None = None
    files: Amount | None = None
    bytes: Amount | None = None
    weight: Annotated[int, Field(ge=1, le=1000)] | None = None
