"""The routes of responses that are kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.api.dialects.responses.background import BackgroundAnswers, tell_error
from deployments.api.dialects.responses.body.input_items import Json
from deployments.api.dialects.responses.growing_response import tell_again
from deployments.api.files.file_routes import Endpoint, read_cut
from deployments.api.files.objects import list_of
from deployments.api.http.event_stream import EventStream, frame_event
from library.library_access import LibraryAccess
from library.responses.kept_responses import Progress
from library.storage.listing import Cut
from library.storage.schema import ResponseRow
from rapid.errors import BadRequest, TooManyRequests

_EVENTS = "text/event-stream"
_LOOK_S = 0.5  # between two looks at a row that another ingress writes
_SILENCE = b"\n\n"


class ResponseRoutes:
    """The endpoints of responses that are kept, or are in the background."""

    def __init__(
        self, library: LibraryAccess, background: BackgroundAnswers, most_streams: Callable[[], int]
    ) -> None:
        """Store where responses are, and a function that returns how many a tenant may follow."""
        self._library, self._background = library, background
        self._most_streams, self._num_streams = most_streams, Counter[str]()

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
        given = query.get("starting_after", "-1")
        if given != "-1" and not (given.isdecimal() and len(given) < 10):
            message = "starting_after must be the sequence_number of an event."
            raise BadRequest(message, "starting_after", "invalid_value")
        events = self._background.follow(row.id, int(given)) or self._follow(row, int(given))
        stack = AsyncExitStack()
        stack.enter_context(self._room_to_follow(row.tenant))
        return EventStream(events, _EVENTS, stack, row.id, tell_error)

    @contextmanager
    def _room_to_follow(self, tenant: str) -> Iterator[None]:
        """Count a stream, which has no place among the requests: the answer may hold the last one.

        Raises:
            TooManyRequests: The tenant has as many streams here as it may have.
        """
        most = self._most_streams()
        if self._num_streams[tenant] >= most:
            what = f"You follow {most} responses here, which is the most that one tenant may"
            raise TooManyRequests(f"{what}: end one of these streams.")
        self._num_streams[tenant] += 1
        try:
            yield
        finally:
            self._num_streams[tenant] -= 1
            self._num_streams += Counter()  # forgets tenants that have none

    async def _follow(self, row: ResponseRow, after: int) -> AsyncIterator[bytes]:
        """Yield the events of a response as its row has them, to its end."""
        while True:
            told, after = await asyncio.to_thread(_tell_part, row, after)  # perhaps megabytes
            yield told or _SILENCE
            if not row.owner:
                return
            responses = (await self._library.get()).responses
            told_of = Progress(row.response["status"], len(row.steps), is_answered=True)
            await asyncio.sleep(_LOOK_S)
            while await responses.find_progress(row.tenant, row.id) == told_of:
                yield _SILENCE
                await asyncio.sleep(_LOOK_S)
            row = await responses.get(row.tenant, row.id)

    async def _delete(self, request: Request) -> Response:
        row = await self._find(request)
        await (await self._library.get()).responses.delete(row.tenant, row.id)
        self._background.stop(row.id, is_deleted=True)
        return JSONResponse({"id": row.id, "object": "response", "deleted": True})

    async def _list_items(self, request: Request) -> Response:
        row = await self._find(request)
        listed = _cut_list(row.input_items, read_cut(request))
        return await asyncio.to_thread(JSONResponse, listed)

    async def _cancel(self, request: Request) -> Response:
        """Answer with the response, which may have ended before it could be cancelled."""
        row = await self._find(request)
        if not row.response.get("background"):
            raise BadRequest("Cannot cancel a synchronous response.", None, "invalid_value")
        await self._background.save(row.id)  # what it says until now stays
        row = await (await self._library.get()).running.cancel(row.tenant, row.id)
        if row.response["status"] == "cancelled":
            self._background.stop(row.id)
        return await asyncio.to_thread(JSONResponse, row.response)

    async def _find(self, request: Request) -> ResponseRow:
        library = await self._library.get()
        return await library.responses.get(request.state.caller, request.path_params["response_id"])


def _tell_part(row: ResponseRow, after: int) -> tuple[bytes, int]:
    """Return the events of a response after one of them, and the number of the last one."""
    told, last = bytearray(), after
    for event in tell_again(row.response, row.steps):  # each as it is now: its items grow on
        if event["sequence_number"] > after:
            told += frame_event(event)
            last = event["sequence_number"]
    return bytes(told), last


def _cut_list(items: list[Json], cut: Cut) -> Json:
    """Return a part of a list of items, which are in the order of their creation."""
    items = items if cut.order == "asc" else items[::-1]
    if cut.after is not None:
        ids = [each.get("id") for each in items]
        if cut.after not in ids:
            raise BadRequest(f"after: there is no {cut.after!r} in this list.", "after")
        items = items[ids.index(cut.after) + 1 :]
    return list_of(items[: cut.limit], has_more=len(items) > cut.limit)
