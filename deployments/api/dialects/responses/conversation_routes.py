"""The routes of ``/v1/conversations``."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.api.dialects.responses.body.input_items import Json, name_items, read_items
from deployments.api.files.bodies_of_files import Metadata
from deployments.api.files.file_routes import Endpoint, read_cut
from deployments.api.files.objects import deletion_object, list_of
from deployments.api.http.bodies import Bodies
from deployments.api.http.json_bodies import read_fields
from library.library_access import LibraryAccess
from library.storage.schema import ConversationRow
from rapid.requests.request_fields import Fields

_MOST_ITEMS = 20  # of one request, as OpenAI's
_NS = 10**9  # nanoseconds of a second


class NewConversation(Fields):
    """The body of ``POST /v1/conversations``."""

    metadata: Metadata | None = None
    items: list[dict[str, Any]] | None = Field(None, max_length=_MOST_ITEMS)


class ChangedConversation(Fields):
    """The body of ``POST /v1/conversations/{id}``."""

    metadata: Metadata | None


class NewItems(Fields):
    """The body of ``POST /v1/conversations/{id}/items``."""

    items: list[dict[str, Any]] = Field(min_length=1, max_length=_MOST_ITEMS)


class ConversationRoutes:
    """The endpoints of conversations."""

    def __init__(self, library: LibraryAccess, bodies: Bodies) -> None:
        self._library, self._bodies = library, bodies

    def endpoints(self) -> Iterator[Endpoint]:
        """Yield the endpoints."""
        path = "/v1/conversations/{conversation_id}"
        items = f"{path}/items"
        yield "POST", "/v1/conversations", self._create
        yield "GET", path, self._get
        yield "POST", path, self._change
        yield "DELETE", path, self._delete
        yield "POST", items, self._put_items
        yield "GET", items, self._list_items
        yield "GET", f"{items}/{{item_id}}", self._get_item
        yield "DELETE", f"{items}/{{item_id}}", self._delete_item

    async def _create(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, NewConversation)
        items = await asyncio.to_thread(_name_new, body.items or [])
        library = await self._library.get()
        tenant: str = request.state.caller
        row = await library.conversations.create(tenant, body.metadata or {}, items)
        return _answer(row)

    async def _get(self, request: Request) -> Response:
        library = await self._library.get()
        return _answer(await library.conversations.get(*_ids(request)))

    async def _change(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, ChangedConversation)
        library = await self._library.get()
        return _answer(await library.conversations.change(*_ids(request), body.metadata or {}))

    async def _delete(self, request: Request) -> Response:
        library, (tenant, conversation_id) = await self._library.get(), _ids(request)
        await library.conversations.delete(tenant, conversation_id)
        return JSONResponse(deletion_object(conversation_id, "conversation"))

    async def _put_items(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, NewItems)
        items = await asyncio.to_thread(_name_new, body.items)
        library = await self._library.get()
        rows = await library.conversations.add(*_ids(request), items)
        listed = list_of([row.item for row in rows], has_more=False)
        return await asyncio.to_thread(JSONResponse, listed)

    async def _list_items(self, request: Request) -> Response:
        library = await self._library.get()
        page = await library.conversations.list_items(*_ids(request), read_cut(request))
        listed = list_of([row.item for row in page.rows], has_more=page.has_more)
        return await asyncio.to_thread(JSONResponse, listed)  # perhaps megabytes

    async def _get_item(self, request: Request) -> Response:
        library, item_id = await self._library.get(), request.path_params["item_id"]
        return JSONResponse(await library.conversations.get_item(*_ids(request), item_id))

    async def _delete_item(self, request: Request) -> Response:
        """Answer with the conversation, as OpenAI does."""
        library, item_id = await self._library.get(), request.path_params["item_id"]
        await library.conversations.delete_item(*_ids(request), item_id)
        return _answer(await library.conversations.get(*_ids(request)))


def _name_new(items: list[Json]) -> list[Json]:
    return name_items(read_items(items, "items"), secrets.token_hex(16))


def _ids(request: Request) -> tuple[str, str]:
    return request.state.caller, request.path_params["conversation_id"]


def _answer(row: ConversationRow) -> Response:
    facts: Json = {"id": row.id, "object": "conversation", "created_at": row.created // _NS}
    return JSONResponse(facts | {"metadata": row.facts})
