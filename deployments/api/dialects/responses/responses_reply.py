"""The answer to a request for a response: its object, whole or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from deployments.api.backend.continuing import Cursor
from deployments.api.dialects.chat.wire import (
    Json,
    Timing,
    count_thinking,
    metrics,
    rapid_receipt,
    render_tokens,
    usage,
)
from deployments.api.dialects.responses.body.input_items import name_items
from deployments.api.dialects.responses.body.responses_request import ResponsesQuestion
from deployments.api.dialects.responses.growing_response import GrowingResponse, hide_results
from deployments.api.dialects.responses.remembering import Memory
from deployments.api.http.dialect import Events
from deployments.api.http.event_stream import frame_event
from library.responses.running_responses import Growth
from rapid.errors import BadRequest, EngineFailed, LibraryUnavailable
from rapid.events import (
    LENGTH,
    CallDelta,
    ChoiceDelta,
    Finished,
    Reading,
    Started,
    TextDelta,
    ThinkingDelta,
)
from rapid.ports import Clock
from rapid.receipt import Receipt

_GONE: Json = {
    "code": "server_error",
    "message": "The response is deleted, or could not be kept: ask again.",
    "retryable": True,
}


class ResponsesReply:
    """A `AnswerRenderer` of OpenAI's responses and their events.

    Attributes:
        body: What was asked for.
        is_ending: Whether the response is being kept as it ended, or given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        asked: ResponsesQuestion,
        cursor: Cursor,
        began: float,
        clock: Clock,
        memory: Memory,
    ) -> None:
        if any(mark.num_chars for mark in cursor.marks):
            param = "Last-Event-ID"
            raise BadRequest(f"{param} is not for responses: use starting_after.", param)
        self._unique = cursor.unique.hex()
        self.id = f"resp_{self._unique}"
        self.body = asked.body
        self._asked, self._memory = asked, memory
        self._timing, self._clock = Timing(began), clock
        self._beginning = begin_object(asked, self.id, cursor.created)
        self._growing = self._begin()
        self.is_ending = False

    def _begin(self) -> GrowingResponse:
        asked = self._asked
        search: Json | None = None
        if asked.search is not None:
            search = {"id": f"fs_{self._unique}_0", "type": "file_search_call"}
            search |= {"status": "completed", "queries": [asked.query]}
            search = hide_results(search, shows_results=asked.shows_results)
        return GrowingResponse(self._beginning, search, shows_results=asked.shows_results)

    async def render_whole(self, events: Events) -> Json:
        """Return the response."""
        last: Json = {}
        async for each in self.tell(events):
            last = each or last
        response: Json = last["response"]
        return response

    async def render(self, events: Events) -> AsyncIterator[bytes]:
        """Yield the events, and empty lines in silence or progress."""
        async for each in self.tell(events):
            yield b"\n\n" if each is None else await self.render_event(each)

    async def render_event(self, event: Json) -> bytes:
        """Return an event as it is now, made in a thread if it tells all that was answered."""
        # Four of the last events do, with its log-probabilities: megabytes. Others are small, and
        # tell of what grows on meanwhile.
        return await asyncio.to_thread(frame_event, event) if self.is_ending else frame_event(event)

    def render_error(self, body: Json) -> bytes:
        """Return the events that end a stream with an error."""
        return b"".join(map(frame_event, self._growing.break_off("failed", _as_error(body))))

    async def queue(self) -> list[Json]:
        """Keep a response in the background that is about to be answered; return its events."""
        told = [*self._growing.queue()]
        items = name_items(self._asked.items, self._unique)
        await self._memory.begin(self._asked, self._growing.snapshot, items)
        return told

    @property
    def growth(self) -> Growth:
        """How far a response in the background is."""
        return Growth(self._asked.tenant, self._growing.snapshot, [*self._growing.steps])

    def cancel(self) -> list[Json]:
        """Return the last events of a response in the background that was cancelled."""
        return [*self._growing.break_off("cancelled")]

    async def fail(self, body: Json) -> list[Json]:
        """Keep a response in the background that has failed, and return its last events."""
        told = [*self._growing.break_off("failed", _as_error(body))]
        self.is_ending = True
        ended = Growth(self._asked.tenant, told[-1]["response"], self._growing.steps)
        return told if await self._memory.end(ended) else [*told[:-1], *await self._tell_end()]

    def lose(self) -> list[Json]:
        """Return the last events of a response in the background that nobody answers any more."""
        return [*self._growing.break_off("failed", _GONE)]

    async def tell(self, events: Events) -> AsyncIterator[Json | None]:
        """Yield the events of the response, and None in silence or progress."""
        has_begun, finish_reason = False, None
        async for event in events:
            if event is None or isinstance(event, Reading):
                yield None
            elif isinstance(event, Started):
                if has_begun and self._asked.chat.stream:
                    continue  # another orchestrator goes on
                if has_begun:
                    self._growing = self._begin()
                has_begun = True
                for each in self._growing.begin():
                    yield each
            elif isinstance(event, ThinkingDelta):
                self._timing.observe(self._clock())
                if self._asked.chat.shows_thinking:
                    for each in self._growing.add_thoughts(event.text):
                        yield each
            elif isinstance(event, TextDelta):
                self._timing.observe(self._clock())
                finish_reason = event.finish_reason or finish_reason
                if event.text or event.logprobs:
                    for each in self._growing.add_text(event.text, render_tokens(event.logprobs)):
                        yield each
            elif isinstance(event, CallDelta):
                piece = event.arguments
                call = self._growing.add_call(event.id, event.name, piece, begins=event.begins)
                for each in call:
                    yield each
            elif isinstance(event, ChoiceDelta):
                raise TypeError(f"a {type(event).__name__} has no place in a response")
            elif isinstance(event, Finished):
                self._timing.done = self._clock()
                before = ("file_search_call", "reasoning")
                if all(each["type"] in before for each in self._growing.output):
                    for each in self._growing.add_text(""):
                        yield each
                ended = self._end(event.receipt, is_cut=finish_reason == LENGTH)
                if self._asked.search is not None and self._asked.shows_results:
                    results = await self._memory.list_results(self._asked, event.receipt)
                    ended["output"][0] |= {"results": results}
                if not await self._keep(ended):
                    for each in await self._tell_end():
                        yield each
                    return
                for each in self._growing.end(ended):
                    yield each
                return
        raise EngineFailed("The answer ended without its receipt.")

    async def _keep(self, ended: Json) -> bool:
        """Keep a response that has ended, unless it is not this server's any more."""
        self.is_ending = True
        if self._asked.body.background:
            return await self._memory.end(Growth(self._asked.tenant, ended, self._growing.steps))
        items = name_items(self._asked.items, self._unique)
        await self._memory.keep(self._asked, ended, items, self._growing.steps)
        return True

    async def _tell_end(self) -> list[Json]:
        """Return the last events of a response in the background that is not ours any more."""
        try:
            ended = await self._memory.find_end(self.growth)
        except LibraryUnavailable:
            return self.lose()
        if ended["status"] in ("completed", "incomplete"):  # kept, though we were not told so
            return [*self._growing.end(ended)]
        if ended["status"] in ("cancelled", "failed"):
            return [*self._growing.break_off(ended["status"], ended["error"])]
        return self.lose()

    def _end(self, receipt: Receipt, *, is_cut: bool) -> Json:
        """Return the response at its end."""
        output, cited = self._growing.output, receipt.citations
        output[-1]["status"] = "incomplete" if is_cut else "completed"
        texts = [each["content"][0] for each in output if each["type"] == "message"]
        for each in cited.found if cited is not None and texts else ():
            place = (each.document, each.document_start, each.document_end)
            file_id = receipt.places.get(place, {}).get("file_id")
            if file_id is not None:
                annotation = {"type": "file_citation", "file_id": file_id}
                annotation |= {"filename": each.document, "index": each.end}
                texts[0]["annotations"].append(annotation)
        counted = usage(receipt)
        return self._beginning | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "output": output,
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": receipt.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": count_thinking(receipt)},
                "total_tokens": counted["total_tokens"],
            },
            "metrics": metrics(receipt, self._timing),
            "rapid": rapid_receipt(receipt),
        }


def begin_object(asked: ResponsesQuestion, response_id: str, created: int) -> Json:
    """Return a response before its answer."""
    body, chat = asked.body, asked.chat
    form = (body.text.format if body.text is not None else None) or {"type": "text"}
    if form.get("type") == "json_schema":
        form = {"description": None, "strict": False} | form
    conversation = body.conversation
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": None if conversation is None else {"id": conversation},
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": asked.is_kept,
        "temperature": asked.temperature,
        "presence_penalty": chat.presence_penalty or 0.0,
        "frequency_penalty": chat.frequency_penalty or 0.0,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_tell_tool(each) for each in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if chat.top_p is None else chat.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _as_error(body: Json) -> Json:
    """Return the ``error`` of a response, given the body of a refusal."""
    error = body["error"]
    told = {"code": error["code"] or "server_error", "message": error["message"]}
    return told | {"retryable": error["retryable"]}


def _tell_tool(tool: Json) -> Json:
    """Return a tool with what was left out of it, which clients take for required."""
    if tool.get("type") != "function":
        return tool
    return {"type": "function", "description": None, "parameters": None, "strict": False} | tool
