"""The earlier turns that a request of `/v1/responses` reads from the library, and its own, kept."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from deployments.api.dialects.responses.body.input_items import Json, count_characters, lighten
from deployments.api.dialects.responses.body.responses_request import (
    Past,
    ResponsesQuestion,
    ResponsesRequest,
)
from deployments.config.api_config import ApiConfig
from library.files.stored_documents import StoredText
from library.library_access import Library, LibraryAccess
from library.responses.kept_responses import Link
from library.responses.running_responses import LEASE_S, Growth
from library.storage.listing import Cut
from rapid.errors import BadRequest, LibraryUnavailable, RapidError, UnknownDocument
from rapid.receipt import ChunkUsed, Receipt

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # between two tries to keep a response while its lease lasts


class Memory:
    """The responses and conversations of a server, as requests need them."""

    def __init__(self, library: LibraryAccess | None) -> None:
        """Remember nothing yet.

        Args:
            library: Where they are kept; None for a server that keeps none.
        """
        self._library = library

    def keeps(self, body: ResponsesRequest) -> bool:
        """Return whether the response to a body is to be kept.

        Raises:
            BadRequest: The body needs what this server has not.
        """
        if self._library is not None:
            if body.background and body.store is False:
                message = "store must be true for a response in the background, which is kept."
                raise BadRequest(message, "store", "invalid_value")
            return body.store is not False
        for name in ("background", "store", "previous_response_id", "conversation"):
            if getattr(body, name):
                message = f"{name} needs a server with a library: this one keeps no responses."
                raise BadRequest(message, name, "unsupported")
        return False

    async def recall(self, tenant: str, body: ResponsesRequest, config: ApiConfig) -> Past:
        """Return what came before a request, at most as many responses or items as messages.

        Raises:
            UnknownDocument: It is not there, or not the tenant's.
            PromptTooLong: It has more characters than a request may have; the rest is not read.
            BadRequest: It is a conversation that takes no more.
        """
        if self._library is None:
            return Past()
        if body.conversation is not None:
            return Past(await self._recall_items(tenant, body, config), "conversation")
        if (name := body.previous_response_id) is None:
            return Past()
        responses = (await self._library.get()).responses
        links = (await responses.list_chain(tenant, name, config.max_messages))[::-1]
        told, attached = _Told(body.model, "previous_response_id", config), dict[str, Any]()
        num_read = 0
        while num_read < len(links):
            for said in await responses.read(tenant, links[num_read:]):
                told.add(said.items[::-1])
                attached = attached if num_read else said.attached
                num_read += 1
        return Past(told.items[::-1], rapid=attached)

    async def _recall_items(
        self, tenant: str, body: ResponsesRequest, config: ApiConfig
    ) -> list[Json]:
        """Return the last items of a conversation."""
        assert self._library is not None
        assert body.conversation is not None
        conversations = (await self._library.get()).conversations
        told, cut = _Told(body.model, "conversation", config), Cut(config.max_messages)
        while cut.limit:
            page = await conversations.list_items(tenant, body.conversation, cut)
            told.add([row.item for row in page.rows])
            if not page.has_more:
                break
            cut = Cut(config.max_messages - len(told.items), after=page.rows[-1].id)
        await conversations.check_room(tenant, body.conversation)
        return told.items[::-1]

    async def resolve(self, tenant: str, body: ResponsesRequest, config: ApiConfig) -> Any:
        """Return the input of a request with the items that it names by their ids.

        Raises:
            UnknownDocument: One is not there, or not the tenant's.
            PromptTooLong: They have more characters than a request may have.
            BadRequest: There are more than a request may have messages.
        """
        given = body.input or []
        if not isinstance(given, list):
            return given
        if len(given) > (most := config.max_messages):
            message = f"input has {len(given)} entries, and this server takes {most} at most"
            raise BadRequest(message, "input", "invalid_value")
        if self._library is None:
            return given
        known: dict[str, Json | None] = {each["id"]: None for each in given if _is_name(each)}
        told = _Told(body.model, "input", config)
        resolved: list[Any] = []
        for index, each in enumerate(given):
            if _is_name(each):
                told.add([await self._find(tenant, each["id"], f"input[{index}].id", known)])
                resolved.append(told.items[-1])
            else:
                resolved.append(each)
        return resolved

    async def _find(
        self, tenant: str, item_id: str, param: str, known: dict[str, Json | None]
    ) -> Json:
        """Return an item of a response, whose id has a part of the response's.

        What else is `known` by its name and is of this response is taken from it, too.
        """
        assert self._library is not None
        if (item := known[item_id]) is not None:
            return item
        unknown = UnknownDocument(f"{param}: there is no item {item_id!r}.", param)
        link = Link(_response_of(item_id), None, 0)
        try:
            (said,) = await (await self._library.get()).responses.read(tenant, [link])
        except BadRequest:  # or it has not ended
            raise unknown from None
        for each in reversed(said.items):  # so that the first of an id stays
            name = each.get("id")
            if name in known and _response_of(name) == link.id:
                known[name] = lighten(each)
        if (item := known[item_id]) is None:
            raise unknown
        return item

    async def keep(
        self,
        asked: ResponsesQuestion,
        ended: Json,
        input_items: Sequence[Json],
        steps: Sequence[Any],
    ) -> None:
        """Keep a response, and say in it if it could not be kept."""
        if self._library is None or not (asked.is_kept or asked.body.conversation):
            return
        try:
            library = await self._library.get()
            attached = _list_attachments(asked)
            await library.responses.keep(asked.tenant, ended, input_items, steps, attached)
        except RapidError:
            if asked.body.conversation:
                raise
            _log.exception("a response is not kept")
            ended["store"] = False

    async def begin(
        self, asked: ResponsesQuestion, response: Json, input_items: Sequence[Json]
    ) -> None:
        """Keep a response in the background that is about to be answered.

        Raises:
            BadRequest: The tenant has too much.
            LibraryUnavailable: It cannot be kept.
        """
        assert self._library is not None
        running = (await self._library.get()).running
        await running.begin(asked.tenant, response, input_items, _list_attachments(asked))

    async def renew(self, ids: Sequence[str], grown: Sequence[Growth]) -> set[str]:
        """Return the ids of the responses that are still this process's to answer.

        Raises:
            LibraryUnavailable: They cannot be known.
        """
        assert self._library is not None
        return await (await self._library.get()).running.renew(ids, grown)

    async def is_cancelled(self, grown: Growth) -> bool:
        """Return whether a response that is not ours any more was cancelled, by any ingress.

        Raises:
            LibraryUnavailable: It cannot be known.
        """
        return bool((await self.find_end(grown))["status"] == "cancelled")

    async def find_end(self, grown: Growth) -> Json:
        """Return a response that is not ours any more, as it is kept.

        The status is empty where it was deleted.

        Raises:
            LibraryUnavailable: It cannot be known.
        """
        assert self._library is not None
        responses = (await self._library.get()).responses
        try:
            row = await responses.get(grown.tenant, grown.response["id"])
        except UnknownDocument:
            return {"status": ""}
        return row.response

    async def end(self, ended: Growth) -> bool:
        """Keep a response in the background as it ended; return whether it was still ours.

        A library that is away is tried again for as long as the lease can last.
        """
        assert self._library is not None
        for _ in range(math.ceil(LEASE_S / _AGAIN_S)):
            try:
                return await (await self._library.get()).running.end(ended)
            except LibraryUnavailable:
                _log.warning("a response that has ended cannot be kept yet")
                await asyncio.sleep(_AGAIN_S)
        return False

    async def list_results(self, asked: ResponsesQuestion, receipt: Receipt) -> list[Json]:
        """Return the passages that were found in a request's vector stores, in OpenAI's form.

        There are none where they cannot be read any more: the answer is not lost for them.
        """
        if self._library is None:
            return []
        try:
            return await self._list_results(await self._library.get(), asked, receipt)
        except RapidError:
            _log.exception("the passages of a response are not listed")
            return []

    async def _list_results(
        self, library: Library, asked: ResponsesQuestion, receipt: Receipt
    ) -> list[Json]:
        search, documents = asked.search, library.documents
        assert search is not None
        found = await documents.find(asked.tenant, (), search.vector_store_ids, search.filters, ())
        stored = {each.file_id: each for each in found}
        ranking = search.ranking_options
        least = -math.inf
        if ranking is not None and ranking.score_threshold is not None:
            least = ranking.score_threshold
        hits: list[tuple[ChunkUsed, StoredText]] = []
        for chunk in sorted(receipt.chunks, key=lambda each: -each.score):
            place: Mapping[str, Any] = receipt.places.get(
                (chunk.document, chunk.start, chunk.end), {}
            )
            known = stored.get(place.get("file_id", ""))
            if known is not None and chunk.score >= least:
                hits.append((chunk, known))
        hits = hits[: search.max_num_results]
        named = {known.file_id: known.ref for _, known in hits}
        read = await documents.resolve(asked.tenant, [*named.values()])
        texts = dict(zip(named, read, strict=True))
        return [
            {
                "file_id": known.file_id,
                "filename": chunk.document,
                "score": chunk.score,
                "text": texts[known.file_id].text[chunk.start : chunk.end],
                "attributes": dict(known.attributes),
            }
            for chunk, known in hits
        ]


class _Told:
    """Items that a model is told, and no more than a request may have."""

    def __init__(self, model: str, param: str, config: ApiConfig) -> None:
        self.items: list[Json] = []
        self._num_chars = 0
        self._check = partial(config.check_characters, model=model, param=param)

    def add(self, items: Sequence[Json]) -> None:
        """Take more items, unless they are too long."""
        for each in items:
            self.items.append(lighten(each))
            self._num_chars += count_characters(each)
            self._check(self._num_chars)


def _response_of(item_id: str) -> str:
    return f"resp_{item_id.split('_')[1]}" if "_" in item_id else "resp_"


def _is_name(item: object) -> bool:
    """Return whether an item of an input stands for one that is known."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _list_attachments(asked: ResponsesQuestion) -> Json:
    rapid = asked.chat.rapid
    if rapid is None:
        return {}
    filters = None if rapid.filters is None else rapid.filters.model_dump(mode="json")
    given = {"file_ids": rapid.file_ids, "vector_store_ids": rapid.vector_store_ids}
    return {name: value for name, value in (given | {"filters": filters}).items() if value}
