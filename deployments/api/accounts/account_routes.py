"""The routes of ``/v1/admin`` and ``/v1/usage``."""

from __future__ import annotations

import datetime
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.api.accounts.account_bodies import MAX_TENANT, ChangedLimits, NewKey, Rotation
from deployments.api.files.objects import list_of
from deployments.api.http.bodies import Bodies
from deployments.api.http.json_bodies import read_fields
from library.accounts import api_keys
from library.accounts.audit_trail import list_acts
from library.accounts.books import Accounts
from library.accounts.callers import Scope
from library.accounts.tenant_limits import LIMITS, read_limits, write_limits
from library.accounts.usage_ledger import GROUPINGS, sum_usage
from library.storage.schema import AuditRow, KeyRow, LimitsRow
from rapid.errors import BadRequest, Forbidden
from rapid.messages import utc_day

Json = dict[str, Any]
Endpoint = tuple[str, str, Scope | None, Callable[[Request], Awaitable[Response]]]
"""A method, a path, the scope that a key must have, and what answers it."""

_NS = 10**9  # nanoseconds of a second
_USUAL_DAYS = 31  # of usage, where no first day is given
_FIRST_DAY = datetime.date(1970, 1, 1)  # of usage; days that many before it are still of a calendar
_MOST_LISTED = 100  # at once, as in lists of OpenAI


class AccountRoutes:
    """The endpoints of accounts; iterating yields them."""

    def __init__(self, accounts: Accounts, bodies: Bodies) -> None:
        self._accounts, self._bodies = accounts, bodies

    def __iter__(self) -> Iterator[Endpoint]:
        """Yield the endpoints."""
        yield "POST", "/v1/admin/keys", "admin", self._create_key
        yield "GET", "/v1/admin/keys", "admin", self._list_keys
        yield "DELETE", "/v1/admin/keys/{key_id}", "admin", self._revoke_key
        yield "POST", "/v1/admin/keys/{key_id}/rotate", "admin", self._rotate_key
        yield "GET", "/v1/admin/limits", "admin", self._list_limits
        yield "POST", "/v1/admin/limits/{tenant}", "admin", self._set_limits
        yield "GET", "/v1/admin/audit", "admin", self._list_acts
        yield "GET", "/v1/usage", None, self._sum_usage

    async def _create_key(self, request: Request) -> Response:
        asked = await read_fields(self._bodies, request, NewKey)
        if asked.expires_at is not None and asked.expires_at <= time.time():
            message = "expires_at is past: give seconds since 1970 that are to come."
            raise BadRequest(message, "expires_at", "invalid_value")
        row, key = await api_keys.create_key(
            await self._accounts.database(),
            asked.tenant,
            asked.name or "",
            asked.scopes,
            asked.expires_at,
            actor=request.state.key.actor,
        )
        return JSONResponse(key_object(row) | {"key": key})

    async def _list_keys(self, request: Request) -> Response:
        query, limit = request.query_params, _limit_of(request)
        tenant = None if "tenant" not in query else _name(query["tenant"])
        database = await self._accounts.database()
        rows = await api_keys.list_keys(database, tenant, query.get("after"), limit + 1)
        return _page([key_object(row) for row in rows], limit)

    async def _revoke_key(self, request: Request) -> Response:
        key_id, actor = request.path_params["key_id"], request.state.key.actor
        row = await api_keys.revoke_key(await self._accounts.database(), key_id, actor=actor)
        return JSONResponse(key_object(row))

    async def _rotate_key(self, request: Request) -> Response:
        asked = await read_fields(self._bodies, request, Rotation)
        key_id, actor = request.path_params["key_id"], request.state.key.actor
        database = await self._accounts.database()
        row, key = await api_keys.rotate_key(database, key_id, asked.grace_seconds, actor=actor)
        return JSONResponse(key_object(row) | {"key": key})

    async def _list_limits(self, request: Request) -> Response:
        rows = await read_limits(await self._accounts.database())
        return _page([limits_object(row) for row in rows], len(rows))

    async def _set_limits(self, request: Request) -> Response:
        asked = await read_fields(self._bodies, request, ChangedLimits)
        tenant = _name(request.path_params["tenant"])
        given = asked.model_dump(exclude_unset=True)
        database, actor = await self._accounts.database(), request.state.key.actor
        return JSONResponse(limits_object(await write_limits(database, tenant, given, actor=actor)))

    async def _list_acts(self, request: Request) -> Response:
        after, limit = request.query_params.get("after"), _limit_of(request)
        if after is not None and not (after.isdecimal() and len(after) < 19):
            raise BadRequest("after must be the id of an act.", "after", "invalid_value")
        database = await self._accounts.database()
        rows = await list_acts(database, None if after is None else int(after), limit + 1)
        return _page([act_object(row) for row in rows], limit)

    async def _sum_usage(self, request: Request) -> Response:
        """Sum the tenant's usage; that of others, or of all, is for administrators."""
        query, caller = request.query_params, request.state.key
        tenant = _name(query.get("tenant", caller.tenant))
        if tenant != caller.tenant and "admin" not in caller.scopes:
            raise Forbidden("The usage of other tenants needs the scope 'admin'.")
        by = query.get("group_by", "day").split(",")
        wrong = [each for each in by if each not in GROUPINGS]
        if wrong or len(set(by)) < len(by):
            known = ", ".join(GROUPINGS)
            raise BadRequest(f"group_by must name each at most once: {known}.", "group_by")
        last = _day_of(request, "end_date", utc_day())
        first = _day_of(request, "start_date", last - datetime.timedelta(days=_USUAL_DAYS))
        sums = await sum_usage(
            await self._accounts.database(),
            None if tenant == "*" else tenant,
            first.isoformat(),
            last.isoformat(),
            [each for each in GROUPINGS if each in by],
        )
        data = [{"object": "usage"} | each for each in sums]
        return JSONResponse({"object": "list", "data": data})


def key_object(row: KeyRow) -> Json:
    """Return a key as lists show it: without the key itself, and without its hash."""
    return {
        "id": row.id,
        "object": "api_key",
        "tenant": row.tenant,
        "name": row.name,
        "scopes": row.scopes.split(),
        "created_at": row.created // _NS,
        "expires_at": row.expires_at,
        "revoked_at": row.revoked_at,
    }


def limits_object(row: LimitsRow) -> Json:
    """Return the limits of a tenant."""
    limits = {name: getattr(row, name) for name in LIMITS}
    return {"id": row.tenant, "object": "tenant_limits", "tenant": row.tenant} | limits


def act_object(row: AuditRow) -> Json:
    """Return an entry of the audit log."""
    return {
        "id": str(row.id),
        "object": "audit_entry",
        "at": row.at,
        "actor": row.actor,
        "action": row.action,
        "subject": row.subject,
    }


def _page(data: Sequence[Json], limit: int) -> Response:
    return JSONResponse(list_of(data[:limit], has_more=len(data) > limit))


def _limit_of(request: Request) -> int:
    limit = request.query_params.get("limit", "20")
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= _MOST_LISTED:
        raise BadRequest(f"limit must be a number from 1 to {_MOST_LISTED}.", "limit")
    return int(limit)


def _day_of(request: Request, name: str, usual: datetime.date) -> datetime.date:
    given = request.query_params.get(name)
    try:
        day = usual if given is None else datetime.datetime.strptime(given, "%Y-%m-%d").date()
        if day >= _FIRST_DAY:
            return day
    except ValueError:
        pass
    message = f"{name} must be a day since {_FIRST_DAY}, written as '2026-01-31'."
    raise BadRequest(message, name, "invalid_value")


def _name(tenant: str) -> str:
    if not 0 < len(tenant) <= MAX_TENANT or not tenant.isprintable():
        message = f"tenant must be a name of at most {MAX_TENANT} printable characters."
        raise BadRequest(message, "tenant", "invalid_value")
    return tenant
