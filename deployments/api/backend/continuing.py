"""Answers that outlive their orchestrator, and streams that outlive their connection.

An answer is a function of its request and its seed, so nobody has to keep a copy of it: it is
generated again, and what the client already has is left out after a checksum has shown that it is
the same. The id in each chunk of a stream says what the client has when it has that chunk, so no
server keeps anything for a stream whose connection breaks.
"""

from __future__ import annotations

import base64
import datetime
import logging
import secrets
import struct
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import astuple, dataclass, replace
from hashlib import blake2b
from typing import Self

from deployments.api.backend.service import GenerationService, Tell
from rapid.answering.plan.request_plan import draw_seed
from rapid.errors import BadRequest, CannotContinue, OrchestratorLost
from rapid.events import (
    CallDelta,
    ChoiceDelta,
    Finished,
    GenerationEvent,
    TextDelta,
    ThinkingDelta,
)
from rapid.messages import GenerateRequest
from rapid.receipt import Failover

_log = logging.getLogger(__name__)

_MAX_LOSSES = 1  # of one request; with the second, what kills orchestrators may be the request
_FORMAT = 1  # version of the event ids; others are refused
_HEAD = struct.Struct(">B16s8sQIIBB")  # the fields of `Cursor`, in their order
_MARK = struct.Struct(">IIIB")  # the fields of `ChoiceCursor`


@dataclass(frozen=True, slots=True)
class ChoiceCursor:
    """How much of one choice a client has.

    Attributes:
        num_chars: Characters of text.
        num_tokens: Tokens with log-probabilities; 0 where the request asks for none.
        checksum: CRC-32 of the text in UTF-8. It guards against accidents only: a client that
            invents an id gets some rest of its own answer.
        is_finished: Whether the client has the finish reason.
    """

    num_chars: int = 0
    num_tokens: int = 0
    checksum: int = 0
    is_finished: bool = False

    def after(self, text: str, num_tokens: int, *, is_finished: bool) -> ChoiceCursor:
        """Return the mark of a client that also has this much more."""
        return ChoiceCursor(
            self.num_chars + len(text),
            self.num_tokens + num_tokens,
            zlib.crc32(text.encode("utf-8", "surrogatepass"), self.checksum),
            self.is_finished or is_finished,
        )

    def after_delta(self, delta: ChoiceDelta) -> ChoiceCursor:
        """Return the mark of a client that also has `delta`; the name of a call is text as well."""
        if isinstance(delta, TextDelta):
            is_finished = delta.finish_reason is not None
            return self.after(delta.text, len(delta.logprobs), is_finished=is_finished)
        return self.after(_spell(delta), 0, is_finished=False)


@dataclass(frozen=True, slots=True)
class Cursor:
    """How much of a stream a client has, with what a server needs to continue it.

    Attributes:
        unique: The stream's own part of its completion id.
        asked: Digest of the tenant and what it asks.
        seed: The seed that was drawn when the request came; it holds unless the body has one.
        created: Time of the request, in seconds since 1970.
        date: Day of the request.
        num_roles: Number of choices whose role the client has.
        has_usage: Whether the client has the usage chunk.
        marks: One mark for each choice.
    """

    unique: bytes
    asked: bytes
    seed: int
    created: int
    date: datetime.date
    num_roles: int
    has_usage: bool
    marks: tuple[ChoiceCursor, ...]

    @classmethod
    def first(cls, request: GenerateRequest) -> Self:
        """Return the place before the first event of the answer to a new request."""
        return cls(
            unique=secrets.token_bytes(16),
            asked=_digest(request),
            seed=draw_seed(),
            created=int(time.time()),
            date=request.date,
            num_roles=0,
            has_usage=False,
            marks=(ChoiceCursor(),) * request.num_answers,
        )

    @classmethod
    def of_event(cls, event_id: str, request: GenerateRequest) -> Self:
        """Return the place that the id of an event names.

        Raises:
            BadRequest: It is no id of this server, or the event belongs to another request, or the
                answer is not streamed.
        """
        if not request.is_streamed:
            raise _refuse("goes with stream: true", "invalid_event_id")
        try:
            packed = base64.b64decode(event_id, b"-_", validate=True)
            form, unique, asked, seed, created, day, num_roles, has_usage = _HEAD.unpack(
                packed[: _HEAD.size]
            )
            marks = tuple(
                ChoiceCursor(chars, tokens, checksum, bool(is_finished))
                for chars, tokens, checksum, is_finished in _MARK.iter_unpack(packed[_HEAD.size :])
            )
            date = datetime.date.fromordinal(day)
        except (ValueError, OverflowError, struct.error):
            form = None
        if form != _FORMAT:
            raise _refuse("is not an id that this server gave to an event", "invalid_event_id")
        if asked != _digest(request) or len(marks) != request.num_answers:
            raise _refuse(
                "belongs to another request: send the very body and key of the stream that broke",
                "foreign_event_id",
            )
        return cls(unique, asked, seed, created, date, num_roles, bool(has_usage), marks)

    @property
    def event_id(self) -> str:
        """The id of the event after which a client is at this place."""
        stream = self.unique, self.asked, self.seed, self.created, self.date.toordinal()
        head = _HEAD.pack(_FORMAT, *stream, self.num_roles, self.has_usage)
        marks = [_MARK.pack(*astuple(mark)) for mark in self.marks]
        return base64.urlsafe_b64encode(b"".join((head, *marks))).decode()

    @property
    def answer_id(self) -> str:
        """The id of the answer, the same for all that continue it and for no other question."""
        stream = self.unique, self.asked, self.seed, self.created, self.date.toordinal()
        return blake2b(_HEAD.pack(_FORMAT, *stream, 0, 0), digest_size=16).hexdigest()

    def after_role(self) -> Cursor:
        """Return the cursor of a client that also has the role of the next choice."""
        return replace(self, num_roles=self.num_roles + 1)

    def after(self, event: GenerationEvent) -> Cursor:
        """Return the cursor of a client that also has what is rendered of this event."""
        if isinstance(event, Finished):
            return replace(self, has_usage=True)
        if not isinstance(event, ChoiceDelta):
            return self
        marks = list(self.marks)
        marks[event.choice] = marks[event.choice].after_delta(event)
        return replace(self, marks=tuple(marks))


def _digest(request: GenerateRequest) -> bytes:
    """Return the digest of all that an answer depends on; a document's text has one already.

    The day is not in it: that of the first request holds for all that continue its stream.
    """
    documents = [(each.name, each.digest) for each in request.documents]
    rest = replace(request, documents=(), request_id="", call_id="", date=datetime.date.min)
    return blake2b(repr((documents, rest)).encode(), digest_size=8).digest()


def _refuse(why: str, code: str) -> BadRequest:
    return BadRequest(f"Last-Event-ID {why}.", "Last-Event-ID", code)


async def continue_events(
    service: GenerationService, request: GenerateRequest, cursor: Cursor, tell: Tell
) -> AsyncGenerator[GenerationEvent]:
    """Yield the events of a request that come after `cursor`, also if its orchestrator is lost.

    If it is lost, the request goes to another orchestrator, once, and a second `Started` comes. A
    streamed answer continues where it was; one that is not streamed begins anew. What is said
    before a `Started`, `tell` is told.

    Raises:
        OrchestratorLost: Two orchestrators were lost.
        CannotContinue: The answer that was generated again is not the one that the client has.
        Exception: What the orchestrator raised.
    """
    request = replace(request, drawn_seed=cursor.seed, date=cursor.date)
    has = list(cursor.marks)
    lost: list[Failover] = []
    while True:
        rest = _Rest(has)
        num_skipped = 0  # tokens that were generated again, of which the next delta tells
        try:
            running = await service.begin(request, tell)
            async with aclosing(running.rest) as events:
                yield running.started
                async for event in events:
                    if isinstance(event, ChoiceDelta) and request.is_streamed:
                        num_skipped += event.num_tokens
                        new = rest.of(event)
                        if new is None:
                            continue
                        has[new.choice] = has[new.choice].after_delta(new)
                        event = replace(new, num_tokens=num_skipped)
                        num_skipped = 0
                    elif isinstance(event, Finished):
                        failovers = (*lost, *event.receipt.failovers)
                        name = running.application
                        receipt = replace(event.receipt, failovers=failovers, application=name)
                        event = Finished(receipt)
                    yield event
            return
        except OrchestratorLost:
            if len(lost) == _MAX_LOSSES:
                raise
            lost.append("orchestrator lost")
            _log.warning("request %s: the orchestrator was lost", request.request_id)


class _Rest:
    """An answer that is generated again, without what the client has of it."""

    def __init__(self, has: Sequence[ChoiceCursor]) -> None:
        self._has = tuple(has)
        self._seen = [ChoiceCursor() for _ in has]

    def of(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """Return what of `delta` the client has not; None if it has all of it.

        Raises:
            CannotContinue: What the client has is not how this answer begins.
        """
        has, seen = self._has[delta.choice], self._seen[delta.choice]
        text = delta if isinstance(delta, TextDelta) else None
        told = text.text if text else _spell(delta)
        num_again = max(0, min(has.num_chars - seen.num_chars, len(told)))
        again, new = told[:num_again], told[num_again:]
        is_finished = text is not None and text.finish_reason is not None
        seen = seen.after(again, 0, is_finished=is_finished)
        is_reached = seen.num_chars >= has.num_chars
        if (
            (is_reached and num_again and seen.checksum != has.checksum)
            or (is_finished and not is_reached)
            or (has.is_finished and new)
        ):
            raise CannotContinue(
                "The answer cannot be continued, because generating it again gave another text: "
                "send the request again from its start, without Last-Event-ID."
            )
        all_logprobs = text.logprobs if text else ()
        logprobs = all_logprobs[max(0, has.num_tokens - seen.num_tokens) :]
        self._seen[delta.choice] = seen.after(new, len(all_logprobs), is_finished=is_finished)
        if has.is_finished or not (new or logprobs or is_finished):
            return None
        if text:
            return replace(text, text=new, logprobs=logprobs)
        if isinstance(delta, ThinkingDelta):
            return replace(delta, text=new)
        if num_again and isinstance(delta, CallDelta):  # a client has all of a name or nothing
            return replace(delta, arguments=new, begins=False)
        return delta


def _spell(delta: ChoiceDelta) -> str:
    """Return what a delta that is no text counts as; nothing for kinds that are sent again."""
    if isinstance(delta, ThinkingDelta):
        return delta.text
    if not isinstance(delta, CallDelta):
        return ""
    return f"\n{delta.name}\n{delta.arguments}" if delta.begins else delta.arguments
