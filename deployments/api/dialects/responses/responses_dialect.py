"""OpenAI's responses as a dialect: a chat whose items, events and object are others."""

from __future__ import annotations

import asyncio

from deployments.api.backend.continuing import Cursor
from deployments.api.dialects.chat.wire import Json
from deployments.api.dialects.responses.body.input_items import read_items
from deployments.api.dialects.responses.body.responses_request import (
    Past,
    ResponsesQuestion,
    ResponsesRequest,
    ask,
    read_body,
)
from deployments.api.dialects.responses.remembering import Memory
from deployments.api.dialects.responses.responses_reply import ResponsesReply
from deployments.api.http.dialect import Dialect
from deployments.api.http.json_bodies import parse_object
from deployments.config.api_config import ApiConfig
from library.library_access import LibraryAccess
from rapid.messages import GenerateRequest
from rapid.ports import Clock


class ResponsesDialect(Dialect):
    """The dialect of ``/v1/responses``."""

    def __init__(self, library: LibraryAccess | None) -> None:
        """Create the dialect.

        Args:
            library: Where responses are kept; None for a server that keeps none.
        """
        self._memory = Memory(library)

    async def parse(
        self, body: bytes, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[ResponsesQuestion, GenerateRequest]:
        """Return the question and its request, with the items of what came before."""
        fields = await asyncio.to_thread(self._fields, body)
        return await self.read(fields, config, request_id, tenant)

    async def read(
        self, fields: Json, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[ResponsesQuestion, GenerateRequest]:
        """Return the question and its request."""
        asked, ignored = await asyncio.to_thread(read_body, fields)
        is_kept = self._memory.keeps(asked)
        given = await self._memory.resolve(tenant, asked, config)
        items = await asyncio.to_thread(read_items, given)
        past = await self._recall(tenant, asked, config)
        of_body = fields, asked, ignored, items, past, config
        chat, search, renaming = await asyncio.to_thread(ask, *of_body)
        temperature = config.card_of(chat.model).default_temperature
        with renaming.tell():
            given = request_id, tenant, temperature
            sent = await asyncio.to_thread(chat.as_generate_request, *given)
        question = ResponsesQuestion(
            body=asked,
            chat=chat,
            items=items,
            tenant=tenant,
            search=search,
            renaming=renaming,
            temperature=sent.temperature,
            is_kept=is_kept,
            past=past,
        )
        return question, sent

    def _fields(self, body: bytes) -> Json:
        return parse_object(body)

    async def _recall(self, tenant: str, asked: ResponsesRequest, config: ApiConfig) -> Past:
        return await self._memory.recall(tenant, asked, config)

    def reply(
        self, asked: ResponsesQuestion, cursor: Cursor, fingerprint: str, began: float, clock: Clock
    ) -> ResponsesReply:
        """Return the renderer of the answer."""
        return ResponsesReply(asked, cursor, began, clock, self._memory)
