"""The routes of ``/v1/vector_stores``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.api.backend.service import GenerationService
from deployments.api.files.bodies_of_files import (
    ChangedStore,
    ChangedStoreFile,
    Chunking,
    NewBatch,
    NewStore,
    NewStoreFile,
    StoreSearch,
)
from deployments.api.files.file_routes import Endpoint, read_cut
from deployments.api.files.objects import (
    batch_object,
    deletion_object,
    list_object,
    list_of,
    place_object,
    store_file_object,
    store_object,
)
from deployments.api.gate.allowances import Allowances
from deployments.api.http.bodies import Bodies
from deployments.api.http.json_bodies import read_fields
from library.files.stored_documents import StoredText
from library.files.vector_stores import check_attributes
from library.library_access import LibraryAccess
from library.parsing import Layout
from library.storage.schema import VectorStoreRow
from rapid.errors import BadRequest
from retrieval.chunking import Chunk
from retrieval.indexing import key_of

_MOST_DIGITS = 9  # of a passage's number; more is beyond any file


class StoreRoutes:
    """The endpoints of vector stores."""

    def __init__(
        self,
        library: LibraryAccess,
        bodies: Bodies,
        service: GenerationService,
        allowances: Allowances,
    ) -> None:
        self._library, self._bodies = library, bodies
        self._service, self._allowances = service, allowances

    def endpoints(self) -> Iterator[Endpoint]:
        """Yield the endpoints."""
        stores = "/v1/vector_stores"
        store = stores + "/{store_id}"
        files, batches = store + "/files", store + "/file_batches"
        yield "POST", stores, self._create
        yield "GET", stores, self._list
        yield "GET", store, self._get
        yield "POST", store, self._change
        yield "DELETE", store, self._delete
        yield "POST", store + "/search", self._search
        yield "POST", files, self._put_file
        yield "GET", files, self._list_files
        yield "GET", files + "/{file_id}", self._get_file
        yield "POST", files + "/{file_id}", self._change_file
        yield "DELETE", files + "/{file_id}", self._remove_file
        yield "GET", files + "/{file_id}/chunks", self._list_chunks
        yield "GET", files + "/{file_id}/content", self._content
        yield "POST", batches, self._put_batch
        yield "GET", batches + "/{batch_id}", self._get_batch
        yield "POST", batches + "/{batch_id}/cancel", self._cancel_batch
        yield "GET", batches + "/{batch_id}/files", self._list_files

    async def _create(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, NewStore)
        library = await self._library.get()
        row = await library.stores.create(
            request.state.caller,
            body.name or "",
            body.metadata,
            body.expires_after.days if body.expires_after else None,
            body.file_ids or (),
            _resolve(body.chunking_strategy),
        )
        return await self._answer(row)

    async def _list(self, request: Request) -> Response:
        library = await self._library.get()
        page = await library.stores.list_stores(request.state.caller, read_cut(request))
        known = await library.stores.count(page.rows)
        return JSONResponse(list_object(page, lambda row: store_object(row, *known[row.id])))

    async def _get(self, request: Request) -> Response:
        library = await self._library.get()
        return await self._answer(await library.stores.get(*_ids(request)))

    async def _change(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, ChangedStore)
        values: dict[str, Any] = {}
        if "name" in body.model_fields_set:
            values["name"] = body.name or ""
        if "metadata" in body.model_fields_set:
            values["facts"] = body.metadata or {}
        if "expires_after" in body.model_fields_set:
            values["expires_after_days"] = body.expires_after.days if body.expires_after else None
        library = await self._library.get()
        return await self._answer(await library.stores.change(*_ids(request), **values))

    async def _delete(self, request: Request) -> Response:
        library = await self._library.get()
        await library.stores.delete(*_ids(request))
        return JSONResponse(deletion_object(request.path_params["store_id"], "vector_store"))

    async def _search(self, request: Request) -> Response:
        """Answer a search; results are ordered by their scores, best first."""
        body = await read_fields(self._bodies, request, StoreSearch)
        tenant, store_id = _ids(request)
        library = await self._library.get()
        query = str(body.query)
        async with self._allowances.admit(request) as settle:
            found = await library.documents.find_in_store(tenant, store_id, body.filters)
            refs = [each.ref for each in found]
            hits = await self._service.search(tenant, refs, query, body.max_num_results)
            settle(0)
        least = body.ranking_options.score_threshold if body.ranking_options else None
        names = {hit.document for hit in hits}
        stored = {key_of(tenant, each.ref)[1]: each for each in found if each.ref.name in names}
        data = []
        for hit in hits:
            if least is None or hit.score >= least:
                text = stored[hit.document_id]
                place = _place(await library.documents.layout(text.file_id), hit)
                data.append(
                    {
                        "file_id": text.file_id,
                        "filename": text.ref.name,
                        "score": hit.score,
                        "attributes": text.attributes,
                        "content": [{"type": "text", "text": hit.text}],
                        "rapid": place,
                    }
                )
        return JSONResponse(
            {
                "object": "vector_store.search_results.page",
                "search_query": [query],
                "data": data,
                "has_more": False,
                "next_page": None,
            }
        )

    async def _put_file(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, NewStoreFile)
        check_attributes(body.attributes or {})
        library = await self._library.get()
        (row,) = await library.stores.put(
            *_ids(request), [body.file_id], body.attributes, _resolve(body.chunking_strategy)
        )
        return JSONResponse(store_file_object(row))

    async def _list_files(self, request: Request) -> Response:
        library = await self._library.get()
        status = request.query_params.get("filter")
        batch_id = request.path_params.get("batch_id")
        if batch_id is not None:
            await library.stores.get_batch(*_ids(request), batch_id)
        page = await library.stores.list_files(*_ids(request), read_cut(request), status, batch_id)
        return JSONResponse(list_object(page, store_file_object))

    async def _get_file(self, request: Request) -> Response:
        library = await self._library.get()
        row = await library.stores.get_file(*_file_ids(request))
        progress = await library.jobs.progress(row.file_id, row.store_id)
        return JSONResponse(store_file_object(row, progress))

    async def _change_file(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, ChangedStoreFile)
        check_attributes(body.attributes)
        library = await self._library.get()
        row = await library.stores.change_file(*_file_ids(request), body.attributes)
        return JSONResponse(store_file_object(row))

    async def _remove_file(self, request: Request) -> Response:
        library = await self._library.get()
        await library.stores.remove_file(*_file_ids(request))
        return JSONResponse(deletion_object(request.path_params["file_id"], "vector_store.file"))

    async def _content(self, request: Request) -> Response:
        """Answer with the text that is searched, and where the pages of its file begin."""
        stored = await self._find_text(request)
        library = await self._library.get()
        (document,) = await library.documents.resolve(request.state.caller, [stored.ref])
        layout = await library.documents.layout(stored.file_id)
        data = [{"type": "text", "text": document.text}]
        return JSONResponse(
            {
                "object": "vector_store.file_content.page",
                "data": data,
                "has_more": False,
                "next_page": None,
                "rapid": {"pages": [each.start for each in layout.pages]},
            }
        )

    async def _list_chunks(self, request: Request) -> Response:
        """Answer with a page of a file's passages as retrieval sees them, in their order."""
        stored, cut = await self._find_text(request), read_cut(request)
        tenant: str = request.state.caller
        first = 0
        if cut.after is not None:
            document_id, _, number = cut.after.rpartition(":")
            if document_id != key_of(tenant, stored.ref)[1] or not number.isdecimal():
                raise BadRequest(f"after: there is no {cut.after!r} in this list.", "after")
            first = int(number[:_MOST_DIGITS]) + 1
        async with self._allowances.admit(request) as settle:
            chunks = await self._service.list_chunks(tenant, stored.ref, first, cut.limit + 1)
            settle(0)
        layout = await (await self._library.get()).documents.layout(stored.file_id)
        data = [
            {
                "id": each.id,
                "object": "vector_store.file.chunk",
                "file_id": stored.file_id,
                "tokens": each.num_tokens,
                "content": [{"type": "text", "text": each.text}],
                "rapid": _place(layout, each),
            }
            for each in chunks[: cut.limit]
        ]
        return JSONResponse(list_of(data, has_more=len(chunks) > cut.limit))

    async def _put_batch(self, request: Request) -> Response:
        body = await read_fields(self._bodies, request, NewBatch)
        check_attributes(body.attributes or {})
        library = await self._library.get()
        batch = await library.stores.put_batch(
            *_ids(request), body.file_ids, body.attributes, _resolve(body.chunking_strategy)
        )
        return await self._answer_batch(request, batch.id)

    async def _get_batch(self, request: Request) -> Response:
        return await self._answer_batch(request, request.path_params["batch_id"])

    async def _cancel_batch(self, request: Request) -> Response:
        library = await self._library.get()
        batch_id = request.path_params["batch_id"]
        await library.stores.cancel_batch(*_ids(request), batch_id)
        return await self._answer_batch(request, batch_id)

    async def _answer(self, row: VectorStoreRow) -> Response:
        known = await (await self._library.get()).stores.count([row])
        return JSONResponse(store_object(row, *known[row.id]))

    async def _answer_batch(self, request: Request, batch_id: str) -> Response:
        library = await self._library.get()
        found = await library.stores.get_batch(*_ids(request), batch_id)
        return JSONResponse(batch_object(*found))

    async def _find_text(self, request: Request) -> StoredText:
        tenant, store_id, file_id = _file_ids(request)
        library = await self._library.get()
        return await library.documents.get_in_store(tenant, store_id, file_id)


def _ids(request: Request) -> tuple[str, str]:
    return request.state.caller, request.path_params["store_id"]


def _file_ids(request: Request) -> tuple[str, str, str]:
    return *_ids(request), request.path_params["file_id"]


def _resolve(chunking: Chunking | None) -> dict[str, Any] | None:
    return chunking.resolve() if chunking else None


def _place(layout: Layout, chunk: Chunk) -> dict[str, Any]:
    """Return where a passage stands in its file."""
    place = layout.locate(chunk.start, chunk.end)
    return {"start": chunk.start, "end": chunk.end, **place_object(place)}
