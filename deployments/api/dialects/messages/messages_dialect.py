"""Anthropic's messages as a dialect: a chat whose blocks, events and errors are others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from deployments.api.backend.continuing import Cursor
from deployments.api.dialects.chat.wire import Json, rapid_receipt
from deployments.api.dialects.messages.messages_request import MessagesQuestion, read_messages
from deployments.api.http.dialect import Dialect, Events
from deployments.api.http.event_stream import frame_event
from deployments.api.http.json_bodies import parse_object
from deployments.config.api_config import ApiConfig
from rapid.errors import BadRequest, EngineFailed
from rapid.events import (
    LENGTH,
    TOOL_CALLS,
    CallDelta,
    ChoiceDelta,
    Finished,
    Reading,
    Started,
    TextDelta,
    ThinkingDelta,
)
from rapid.messages import GenerateRequest
from rapid.ports import Clock
from rapid.receipt import Receipt

_REASONS = {LENGTH: "max_tokens", TOOL_CALLS: "tool_use"}  # others are ``end_turn``


class MessagesDialect(Dialect):
    """The dialect of ``/v1/messages``."""

    async def parse(
        self, body: bytes, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[MessagesQuestion, GenerateRequest]:
        """Return the question and its request."""
        fields = await asyncio.to_thread(parse_object, body)
        return await self.read(fields, config, request_id, tenant)

    async def read(
        self, fields: Json, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[MessagesQuestion, GenerateRequest]:
        """Return the question and its request."""
        question = await asyncio.to_thread(read_messages, fields, config)
        temperature = config.card_of(question.chat.model).default_temperature
        with question.renaming.tell():
            given = request_id, tenant, temperature
            return question, await asyncio.to_thread(question.chat.as_generate_request, *given)

    def render_refusal(self, body: Json) -> Json:
        """Return Anthropic's body, which keeps the field and the code of OpenAI's."""
        error = body["error"]
        kind = error["type"]
        if kind == "server_error":
            kind = "overloaded_error" if error["retryable"] else "api_error"
        elif error["code"] == "missing_scope":
            kind = "permission_error"
        elif (error["code"] or "").endswith("_not_found"):
            kind = "not_found_error"
        return {"type": "error", "error": error | {"type": kind}}

    def reply(
        self, asked: MessagesQuestion, cursor: Cursor, fingerprint: str, began: float, clock: Clock
    ) -> MessagesReply:
        """Return the renderer of the answer."""
        return MessagesReply(asked, cursor, self.render_refusal)


class MessagesReply:
    """A `AnswerRenderer` of Anthropic's messages and their events."""

    media_type = "text/event-stream"

    def __init__(
        self, asked: MessagesQuestion, cursor: Cursor, refuse: Callable[[Json], Json]
    ) -> None:
        if any(mark.num_chars for mark in cursor.marks):
            raise BadRequest("Last-Event-ID is not for messages.", "Last-Event-ID")
        self.id = f"msg_{cursor.unique.hex()}"
        self._asked, self._refuse = asked, refuse
        self._blocks: list[Json] = []

    async def render_whole(self, events: Events) -> Json:
        """Return the message; a text is cut into blocks where its citations begin and end."""
        message: Json = {}
        async for each in self._tell(events):
            if each is not None and "message" in each:
                message = each["message"]
            elif each is not None and each["type"] == "message_delta":
                message |= each["delta"] | {"usage": each["usage"], "rapid": each["rapid"]}
        content = [part for each in self._blocks for part in _cut(each)]
        return message | {"content": content}

    async def render(self, events: Events) -> AsyncIterator[bytes]:
        """Yield the events; silence and progress are one that says nothing."""
        async for each in self._tell(events):
            yield frame_event({"type": "ping"} if each is None else each)

    def render_error(self, body: Json) -> bytes:
        """Return the event that ends a stream with an error."""
        return frame_event(self._refuse(body))

    async def _tell(self, events: Events) -> AsyncIterator[Json | None]:
        has_begun, reason = False, ""
        async for event in events:
            if event is None or isinstance(event, Reading):
                yield None
            elif isinstance(event, Started):
                if has_begun and self._asked.body.stream:
                    continue  # another orchestrator goes on
                has_begun, self._blocks = True, []
                yield {"type": "message_start", "message": self._begin(event)}
            elif isinstance(event, ThinkingDelta):
                if self._asked.chat.shows_thinking:
                    for each in self._add_thoughts(event.text):
                        yield each
            elif isinstance(event, TextDelta):
                reason = event.finish_reason or reason
                if event.text:
                    for each in self._add_text(event.text):
                        yield each
            elif isinstance(event, CallDelta):
                for each in self._add_call(event):
                    yield each
            elif isinstance(event, ChoiceDelta):
                raise TypeError(f"a {type(event).__name__} has no place in a message")
            elif isinstance(event, Finished):
                for each in self._cite(event.receipt):
                    yield each
                for each in self._end_block():
                    yield each
                delta = {"stop_sequence": None, "stop_reason": _REASONS.get(reason, "end_turn")}
                told = {"usage": _usage(event.receipt), "rapid": rapid_receipt(event.receipt)}
                yield {"type": "message_delta", "delta": delta} | told
                yield {"type": "message_stop"}
                return
        raise EngineFailed("The answer ended without its receipt.")

    def _begin(self, started: Started) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._asked.body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": started.prompt_tokens, "output_tokens": 0},
        }

    def _add_text(self, text: str) -> Iterator[Json]:
        if not self._blocks or self._blocks[-1]["type"] != "text":
            yield from self._add_block({"type": "text", "text": ""})
        self._blocks[-1]["text"] += text
        yield self._change({"type": "text_delta", "text": text})

    def _add_thoughts(self, text: str) -> Iterator[Json]:
        if not self._blocks:  # a signature that says nothing: SDKs require one
            yield from self._add_block({"type": "thinking", "thinking": "", "signature": ""})
        self._blocks[-1]["thinking"] += text
        yield self._change({"type": "thinking_delta", "thinking": text})

    def _add_call(self, call: CallDelta) -> Iterator[Json]:
        if call.begins:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._add_block(block)
            self._blocks[-1]["json"] = ""
        self._blocks[-1]["json"] += call.arguments
        if call.arguments:
            yield self._change({"type": "input_json_delta", "partial_json": call.arguments})

    def _add_block(self, block: Json) -> Iterator[Json]:
        yield from self._end_block()
        self._blocks.append(block)
        place = {"type": "content_block_start", "index": len(self._blocks) - 1}
        yield place | {"content_block": dict(block)}

    def _end_block(self) -> Iterator[Json]:
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _change(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _cite(self, receipt: Receipt) -> Iterator[Json]:
        """Tell the citations of the block that is open, if it is a text, and keep their places."""
        found = receipt.citations.found if receipt.citations is not None else ()
        if not self._blocks or self._blocks[-1]["type"] != "text":
            return
        cited: list[tuple[int, int, Json]] = []
        for each in found:
            place = (each.document, each.document_start, each.document_end)
            file_id = receipt.places.get(place, {}).get("file_id")
            source = file_id or each.document
            if source in self._asked.sources:
                index = self._asked.sources.index(source)
                citation = {
                    "type": "char_location",
                    "cited_text": each.quote,
                    "document_index": index,
                    "document_title": self._asked.titles[index],
                    "file_id": file_id,
                    "start_char_index": each.document_start,
                    "end_char_index": each.document_end,
                }
                cited.append((each.start, each.end, citation))
                yield self._change({"type": "citations_delta", "citation": citation})
        self._blocks[-1]["cited"] = cited


def _cut(block: Json) -> Iterator[Json]:
    """Yield the blocks of a block, each with the citations of its words."""
    if block["type"] == "thinking":
        yield block
        return
    if block["type"] == "tool_use":
        yield {k: v for k, v in block.items() if k != "json"} | {
            "input": _read_input(block["json"])
        }
        return
    text, at = block["text"], 0
    spans: dict[tuple[int, int], list[Json]] = {}
    for start, end, citation in sorted(block.get("cited", ()), key=lambda each: each[:2]):
        spans.setdefault((start, end), []).append(citation)
    for (start, end), citations in spans.items():
        if at < start:
            yield {"type": "text", "text": text[at:start], "citations": None}
        if at < end:
            yield {"type": "text", "text": text[max(at, start) : end], "citations": citations}
        at = max(at, end)
    if at < len(text):
        yield {"type": "text", "text": text[at:], "citations": None}


def _read_input(arguments: str) -> Any:
    """Return the arguments of a call; those of a cut answer are none."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {}


def _usage(receipt: Receipt) -> Json:
    """Return the numbers of tokens; those that were found in a cache are counted apart."""
    return {
        "input_tokens": receipt.prompt_tokens - receipt.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": receipt.cached_tokens,
        "output_tokens": sum(each.completion_tokens for each in receipt.choices),
    }
