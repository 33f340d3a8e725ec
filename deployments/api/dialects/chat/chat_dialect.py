"""OpenAI's chat completions as a dialect.

Many clients are no parsers of server-sent events: they split at blank lines, or cut `data: ` off
each line, and take all the rest for JSON. So an event is one line of data, its id is a field of the
JSON, and what fills silence is an empty block, unless the client asks for comments.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Protocol

from deployments.api.backend.continuing import Cursor
from deployments.api.dialects.chat import parsing
from deployments.api.dialects.chat.chat_request import ChatRequest
from deployments.api.dialects.chat.wire import (
    GrowingChoice,
    Json,
    ReplyFrame,
    Timing,
    rapid_receipt,
)
from deployments.api.http.dialect import Dialect, Events
from deployments.api.http.json_bodies import parse_aside
from deployments.config.api_config import ApiConfig
from rapid.errors import EngineFailed
from rapid.events import ChoiceDelta, Finished, Reading, Started, TextDelta, ThinkingDelta
from rapid.messages import GenerateRequest
from rapid.ports import Clock

_FEW_TOKENS = 512  # with log-probabilities: about 8 ms; of more, a thread renders the answer


class ChatDialect(Dialect):
    """The dialect of ``/v1/chat/completions``."""

    async def parse(
        self, body: bytes, config: ApiConfig, request_id: str, tenant: str
    ) -> tuple[ChatRequest, GenerateRequest]:
        """Return the question and its request; a long body is parsed in a thread."""
        return await parse_aside(parsing.parse_question, body, config, request_id, tenant)

    def reply(
        self, asked: ChatRequest, cursor: Cursor, fingerprint: str, began: float, clock: Clock
    ) -> ChatReply:
        """Return the renderer of the answer."""
        return ChatReply(asked, cursor, fingerprint, Timing(began), clock)


class AskedForm(Protocol):
    """The fields of a request's body on which the form of its reply depends."""

    @property
    def model(self) -> str: ...
    @property
    def logprobs(self) -> int | None: ...
    @property
    def includes_usage(self) -> bool: ...
    @property
    def says_progress(self) -> bool: ...
    @property
    def return_progress(self) -> bool | None: ...
    @property
    def shows_thinking(self) -> bool: ...


class ChatReply:
    """A `AnswerRenderer` of OpenAI's completions and chunks."""

    media_type = "text/event-stream"

    def __init__(
        self, asked: AskedForm, cursor: Cursor, fingerprint: str, timing: Timing, clock: Clock
    ) -> None:
        self.id = f"chatcmpl-{cursor.unique.hex()}"
        self._asked, self._cursor = asked, cursor
        self._timing, self._clock = timing, clock
        self._reads_since, self._read = timing.began, Reading(0, 0)
        self._frame = ReplyFrame(
            id=self.id,
            created=cursor.created,
            model=asked.model,
            fingerprint=fingerprint,
            has_logprobs=bool(asked.logprobs),
            includes_usage=asked.includes_usage,
        )

    async def render_whole(self, events: Events) -> Json:
        """Return the completion."""
        choices = [GrowingChoice() for _ in self._cursor.marks]
        async for event in events:
            if isinstance(event, Started):  # also when an orchestrator was lost: it begins again
                choices = [GrowingChoice() for _ in choices]
                self._timing.first_token = None
            elif isinstance(event, ChoiceDelta):
                if self._is_shown(event):
                    choices[event.choice].add(event)
                self._timing.observe(self._clock())
            elif isinstance(event, Finished):
                self._timing.done = self._clock()
                ends = choices, event.receipt, self._timing
                if sum(len(choice.logprobs) for choice in choices) <= _FEW_TOKENS:
                    return self._frame.completion(*ends)
                return await asyncio.to_thread(self._frame.completion, *ends)
        raise EngineFailed("The answer ended without its receipt.")

    async def render(self, events: Events) -> AsyncIterator[bytes]:
        """Yield the chunks after the cursor, and comments, which clients may pass over.

        A comment says how far the documents are embedded or read, or fills a silence. The chunk
        that ends the last choice is held back until the receipt, which it carries.
        """
        frame, cursor = self._frame, self._cursor
        num_growing = sum(not mark.is_finished for mark in cursor.marks)
        has_ended = not num_growing
        for choice in range(cursor.num_roles, len(cursor.marks)):
            cursor = cursor.after_role()
            yield _chunk(frame.role_chunk(choice), cursor)
        if cursor == self._cursor:  # no chunk begins it, and the first text may be seconds away
            yield self._comment("ping")
        last: TextDelta | None = None
        async for event in events:
            if event is None:
                yield self._comment("ping")
            elif isinstance(event, Reading):
                if event.num_read < event.num_all or event.unit == "passages":
                    yield self._comment(_progress(event))
                if event.unit == "tokens":
                    for chunk in self._tell_prompt(event):
                        yield _chunk(chunk, cursor)
            elif isinstance(event, Started):
                if self._asked.says_progress:
                    yield self._comment(f"decided {event.mode}: {event.reason}")
                self._reads_since = self._clock()
                for chunk in self._tell_prompt(Reading(0, event.prompt_tokens)):
                    yield _chunk(chunk, cursor)
            elif isinstance(event, ChoiceDelta):
                for chunk in self._tell_prompt(replace(self._read, num_read=self._read.num_all)):
                    yield _chunk(chunk, cursor)
                self._timing.observe(self._clock())
                if isinstance(event, TextDelta):
                    num_growing -= event.finish_reason is not None
                    if not num_growing:
                        last = event
                        continue
                cursor = cursor.after(event)
                if self._is_shown(event):
                    yield _chunk(frame.delta_chunk(event), cursor)
            elif isinstance(event, Finished):
                self._timing.done = self._clock()
                if last is not None:
                    cursor = cursor.after(last)
                    receipt = {"rapid": rapid_receipt(event.receipt)}
                    yield _chunk(frame.delta_chunk(last) | receipt, cursor)
                elif not has_ended:
                    raise EngineFailed("The answer ended before all of its choices did.")
                if frame.includes_usage and not cursor.has_usage:
                    cursor = cursor.after(event)
                    yield _chunk(frame.usage_chunk(event.receipt, self._timing), cursor)
        yield b"data: [DONE]\n\n"

    def render_error(self, body: Json) -> bytes:
        """Return the event that ends a stream with an error."""
        return _event(body)

    def _tell_prompt(self, read: Reading) -> Iterator[Json]:
        """Yield how much of the prompt is read, for who asked so, until the answer begins."""
        is_news, self._read = read != self._read, read
        is_waiting = self._timing.first_token is None
        if self._asked.return_progress and read.num_all and is_news and is_waiting:
            time_s = self._clock() - self._reads_since
            yield self._frame.progress_chunk(read, time_s)

    def _is_shown(self, delta: ChoiceDelta) -> bool:
        return self._asked.shows_thinking or not isinstance(delta, ThinkingDelta)

    def _comment(self, comment: str) -> bytes:
        return f": {comment}\n\n".encode() if self._asked.says_progress else b"\n\n"


def _progress(event: Reading) -> str:
    """Return what a comment says of progress; a client may read it, as `rapid ask` does."""
    if event.unit == "tokens":
        return f"reading {event.num_read} of {event.num_all} tokens"
    of = f" {event.num_read:,} of {event.num_all:,}" if event.num_all else ""
    return f"embedding passages{of}"


def _chunk(chunk: Json, cursor: Cursor) -> bytes:
    """Return the event of a chunk; a client that has it is at `cursor`."""
    return _event(chunk | {"rapid_event_id": cursor.event_id})


def _event(body: Json) -> bytes:
    """Return one event, in ASCII because some clients take U+2028 for the end of a line."""
    return b"data: %s\n\n" % json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
