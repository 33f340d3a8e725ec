"""The routes of responses that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.api.dialects.responses.growing_response import tell_again
from deployments.api.dialects.responses.input_items import Json
from deployments.api.dialects.responses.responses_reply import frame
from deployments.api.files.file_routes import Endpoint, read_cut
from deployments.api.files.objects import list_of
from library.library_access import LibraryAccess
from library.listing import Cut
from library.schema import ResponseRow
from rapid.errors import BadRequest


class ResponseRoutes:
    """The endpoints of responses that are kept."""

    def __init__(self, library: LibraryAccess) -> None:
        self._library = library

    def endpoints(self) -> Iterator[Endpoint]:
        """Yield the endpoints."""
        path = "/v1/responses/{response_id}"
        yield "GET", path, self._get
        yield "DELETE", path, self._delete
        yield "GET", f"{path}/input_items", self._list_items
        yield "POST", f"{path}/cancel", self._cancel

    async def _get(self, request: Request) -> Response:
        """Answer with a response, or with its events after one of them."""
        row, query = await self._find(request), request.query_params
        if query.get("stream", "false").lower() != "true":
            return await asyncio.to_thread(JSONResponse, row.response)
        after = query.get("starting_after", "-1")
        if after != "-1" and not (after.isdecimal() and len(after) < 10):
            message = "starting_after must be the sequence_number of an event."
            raise BadRequest(message, "starting_after", "invalid_value")
        first = row.response["output"][0]

        def tell() -> bytes:
            shows = first.get("results") is not None
            events = tell_again(row.response, row.steps, shows_results=shows)
            return b"".join(frame(each) for each in events if each["sequence_number"] > int(after))

        told = await asyncio.to_thread(tell)  # kept responses may be megabytes
        return Response(told, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await (await self._library.get()).responses.delete(request.state.caller, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _list_items(self, request: Request) -> Response:
        row = await self._find(request)
        listed = _cut_list(row.input_items, read_cut(request))
        return await asyncio.to_thread(JSONResponse, listed)

    async def _cancel(self, request: Request) -> Response:
        await self._find(request)
        raise BadRequest("Cannot cancel a synchronous response.", None, "invalid_value")

    async def _find(self, request: Request) -> ResponseRow:
        library = await self._library.get()
        return await library.responses.get(request.state.caller, request.path_params["response_id"])


def _cut_list(items: list[Json], cut: Cut) -> Json:
    """Return a part of a list of items, which are in the order of their creation."""
    items = items if cut.order == "asc" else items[::-1]
    if cut.after is not None:
        ids = [each.get("id") for each in items]
        if cut.after not in ids:
            raise BadRequest(f"after: there is no {cut.after!r} in this list.", "after")
        items = items[ids.index(cut.after) + 1 :]
    return list_of(items[: cut.limit], has_more=len(items) > cut.limit)
