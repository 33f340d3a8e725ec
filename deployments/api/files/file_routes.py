"""The routes of ``/v1/files``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Literal, get_args
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deployments.api.files.objects import (
    certificate_object,
    deletion_object,
    file_object,
    list_object,
)
from deployments.api.files.uploads import read_upload
from deployments.api.http.bodies import Bodies
from library.library_access import LibraryAccess
from library.storage.listing import Cut
from rapid.errors import BadRequest, UnknownDocument

Endpoint = tuple[str, str, Callable[[Request], Awaitable[Response]]]
"""A method, a path, and what answers it."""

Purpose = Literal["assistants", "user_data", "batch", "fine-tune", "vision", "evals"]
_MOST_LISTED = 10_000  # as OpenAI's
_ORDERS: dict[str, Literal["asc", "desc"]] = {"asc": "asc", "desc": "desc"}
_FORGETTING_S = 5.0  # that an answer waits for everything of a deleted file to be gone
_EXPIRY_S = range(3600, 2_592_001)  # as OpenAI's: from an hour to thirty days


class FileRoutes:
    """The endpoints of files."""

    def __init__(self, library: LibraryAccess, bodies: Bodies) -> None:
        self._library, self._bodies = library, bodies

    def endpoints(self) -> Iterator[Endpoint]:
        """Yield the endpoints."""
        yield "POST", "/v1/files", self._upload
        yield "GET", "/v1/files", self._list
        yield "GET", "/v1/files/{file_id}", self._get
        yield "GET", "/v1/files/{file_id}/content", self._content
        yield "DELETE", "/v1/files/{file_id}", self._delete

    async def _upload(self, request: Request) -> Response:
        tenant: str = request.state.caller
        library = await self._library.get()
        longest = library.config.max_file_bytes
        async with read_upload(request, self._bodies, tenant, longest) as upload:
            row = await library.files.add(
                tenant,
                upload.filename,
                _purpose(upload.fields.get("purpose")),
                upload.content,
                _expiry(upload.fields),
                prefills=_is_set(upload.fields, "prefill"),
            )
        return JSONResponse(file_object(row))

    async def _list(self, request: Request) -> Response:
        cut = read_cut(request, 10_000, _MOST_LISTED)
        purpose = request.query_params.get("purpose")
        library = await self._library.get()
        page = await library.files.list_files(request.state.caller, cut, purpose)
        return JSONResponse(list_object(page, file_object))

    async def _get(self, request: Request) -> Response:
        library = await self._library.get()
        row = await library.files.get(request.state.caller, request.path_params["file_id"])
        return JSONResponse(file_object(row, await library.jobs.progress(row.id)))

    async def _content(self, request: Request) -> Response:
        library = await self._library.get()
        row = await library.files.get(request.state.caller, request.path_params["file_id"])
        parts = library.files.stream(row)
        first = await anext(parts)  # before the response begins, as it may not be there
        return StreamingResponse(
            _join(first, parts),
            media_type="application/octet-stream",  # so that no browser shows it as a page of ours
            headers={
                "content-length": str(row.num_bytes),
                "content-disposition": f"attachment; filename*=UTF-8''{quote(row.filename)}",
                "x-content-type-options": "nosniff",
            },
        )

    async def _delete(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        library = await self._library.get()
        tenant: str = request.state.caller
        try:
            await library.delete(tenant, file_id)
        except UnknownDocument:  # perhaps it is deleted, and this asks whether all of it is gone
            if await library.deletions.find(tenant, file_id) is None:
                raise
        row = await library.deletions.wait(tenant, file_id, _FORGETTING_S)
        return JSONResponse(deletion_object(file_id, "file") | certificate_object(row))


async def _join(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for part in rest:
        yield part


def read_cut(request: Request, usual: int = 20, most: int = 100) -> Cut:
    """Return the part of a list that a query asks for.

    Raises:
        BadRequest: The query is none.
    """
    query = request.query_params
    limit = _read_number(query.get("limit", str(usual)), range(1, most + 1))
    order = _ORDERS.get(query.get("order", "desc"))
    if limit is None:
        raise BadRequest(f"limit must be a number from 1 to {most}.", "limit", "invalid_value")
    if order is None:
        raise BadRequest("order must be 'asc' or 'desc'.", "order", "invalid_value")
    return Cut(limit, order, query.get("after"), query.get("before"))


def _read_number(given: str, allowed: range) -> int | None:
    """Return a number in a range; None for anything else, such as one of thousands of digits."""
    is_short = given.isdecimal() and len(given) <= len(str(allowed[-1]))
    return int(given) if is_short and int(given) in allowed else None


def _purpose(given: str | None) -> str:
    if given in get_args(Purpose):
        return str(given)
    known = ", ".join(map(repr, get_args(Purpose)))
    raise BadRequest(f"purpose must be one of {known}.", "purpose", "invalid_value")


def _is_set(fields: dict[str, Any], name: str) -> bool:
    given = str(fields.get(name, "false")).lower()
    if given not in ("true", "false"):
        raise BadRequest(f"{name} must be true or false.", name, "invalid_value")
    return given == "true"


def _expiry(fields: dict[str, Any]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    found = _read_number(str(seconds), _EXPIRY_S)
    if anchor != "created_at" or found is None:
        raise BadRequest(
            f"expires_after must have anchor 'created_at' and seconds from {_EXPIRY_S[0]} to "
            f"{_EXPIRY_S[-1]}.",
            "expires_after",
            "invalid_value",
        )
    return found
