"""A response while its answer grows, and the events that tell of it, in OpenAI's order.

The events are a function of the response at its end and of the steps in which it grew, so that they
can be told again from what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from deployments.api.dialects.responses.body.input_items import Json

Step = Sequence[int]
"""An item's place in the output, the characters that it grew by, and its log-probabilities."""

LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
"""The events of which a stream has one, at its end."""

_SEARCH = "response.file_search_call"


class GrowingResponse:
    """Makes the events of one response.

    Attributes:
        output: The items so far.
        steps: How they grew.
    """

    def __init__(self, beginning: Json, search: Json | None, *, shows_results: bool) -> None:
        """Tell nothing yet.

        Args:
            beginning: The response before there is any answer.
            search: The item of the search; None for none.
            shows_results: Whether its results are told, which are known at the end.
        """
        self._beginning, self._shows_results = beginning, shows_results
        self._search = search
        self._number = 0
        self._open: int | None = None  # the item that grows
        self._has_begun = False
        self.output: list[Json] = []
        self.steps: list[Step] = []

    def queue(self) -> Iterator[Json]:
        """Yield what is told of a response in the background before it is begun."""
        yield self._tell("response.created", response=self.snapshot)
        yield self._tell("response.queued", response=self.snapshot)

    @property
    def snapshot(self) -> Json:
        """The response so far, which is not its end."""
        status = "in_progress" if self._has_begun else "queued"
        return self._beginning | {"status": status, "output": self.output}

    def begin(self) -> Iterator[Json]:
        """Yield what is told before the answer."""
        self._has_begun = True
        if not self._beginning.get("background"):
            yield self._tell("response.created", response=self._beginning)
        yield self._tell("response.in_progress", response=self._beginning)
        if self._search is not None:
            self.output.append(self._search)
            begun = self._search | {"status": "in_progress"}
            yield self._tell("response.output_item.added", output_index=0, item=begun)
            place = {"output_index": 0, "item_id": self._search["id"]}
            yield self._tell(f"{_SEARCH}.in_progress", **place)
            yield self._tell(f"{_SEARCH}.searching", **place)
            if not self._shows_results:
                yield from self._end_search(self._search)

    def add_text(self, text: str, logprobs: Sequence[Json] = ()) -> Iterator[Json]:
        """Yield what is told of new text."""
        if self._open is None or self.output[self._open]["type"] != "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            message = {"type": "message", "role": "assistant", "content": []}
            yield from self._add_item("msg", message)
            place = {"content_index": 0} | self._place()
            yield self._tell("response.content_part.added", **place, part=dict(part))
            self.output[-1]["content"] = [part | {"logprobs": []}]
        assert self._open is not None
        part = self.output[self._open]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        self.steps.append((self._open, len(text), len(logprobs)))
        if text or logprobs:
            place = {"content_index": 0} | self._place()
            yield self._tell(
                "response.output_text.delta", **place, delta=text, logprobs=list(logprobs)
            )

    def add_thoughts(self, text: str) -> Iterator[Json]:
        """Yield what is told of new thinking."""
        if self._open is None or self.output[self._open]["type"] != "reasoning":
            yield from self._add_item("rs", {"type": "reasoning", "summary": [], "content": []})
            part = {"type": "reasoning_text", "text": ""}
            place = {"content_index": 0} | self._place()
            yield self._tell("response.content_part.added", **place, part=dict(part))
            self.output[-1]["content"] = [part]
        assert self._open is not None
        self.output[self._open]["content"][0]["text"] += text
        self.steps.append((self._open, len(text), 0))
        place = {"content_index": 0} | self._place()
        yield self._tell("response.reasoning_text.delta", **place, delta=text)

    def add_call(self, call_id: str, name: str, piece: str, *, begins: bool) -> Iterator[Json]:
        """Yield what is told of a call of a function, or of more of its arguments."""
        if begins:
            call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
            yield from self._add_item("fc", call)
        assert self._open is not None
        self.output[self._open]["arguments"] += piece
        self.steps.append((self._open, len(piece), 0))
        if piece:
            kind = "response.function_call_arguments.delta"
            yield self._tell(kind, **self._place(), delta=piece)

    def end(self, ended: Json) -> Iterator[Json]:
        """Yield what is told of the end of a response, which is `ended` then."""
        self.output = ended["output"]
        if self._search is not None and self._shows_results:
            yield from self._end_search(self.output[0])
        yield from self._end_item()
        yield self._tell(f"response.{ended['status']}", response=ended)

    def break_off(self, status: str, error: Json | None = None) -> Iterator[Json]:
        """Yield what is told of the end of a response that ``failed`` or was ``cancelled``."""
        if not self._has_begun:
            yield from self.begin()
        ended = self.snapshot | {"status": status, "error": error}
        # OpenAI's SDKs know no event for a cancelled response; its status tells it apart.
        kind = "incomplete" if status == "cancelled" else status
        yield self._tell(f"response.{kind}", response=ended)
        self._number -= 1  # nothing comes after it, but another end may be told instead

    def _add_item(self, prefix: str, item: Json) -> Iterator[Json]:
        yield from self._end_item()
        unique = self._beginning["id"].partition("_")[2]
        self._open = len(self.output)
        item = {"id": f"{prefix}_{unique}_{self._open}"} | item | {"status": "in_progress"}
        self.output.append(item)
        place = {"output_index": self._open}
        yield self._tell("response.output_item.added", **place, item=dict(item))

    def _end_item(self) -> Iterator[Json]:
        if self._open is None:
            return
        item = self.output[self._open]
        if item["status"] == "in_progress":
            item["status"] = "completed"
        place = self._place()
        if item["type"] == "message":
            (part,), at = item["content"], {"content_index": 0} | place
            for index, each in enumerate(part["annotations"]):
                yield self._tell(
                    "response.output_text.annotation.added",
                    **at,
                    annotation_index=index,
                    annotation=each,
                )
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._tell("response.output_text.done", **at, **told)
            yield self._tell("response.content_part.done", **at, part=part)
        elif item["type"] == "reasoning":
            (part,), at = item["content"], {"content_index": 0} | place
            yield self._tell("response.reasoning_text.done", **at, text=part["text"])
            yield self._tell("response.content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._tell("response.function_call_arguments.done", **place, **told)
        yield self._tell("response.output_item.done", output_index=self._open, item=item)
        self._open = None

    def _end_search(self, item: Json) -> Iterator[Json]:
        place = {"output_index": 0, "item_id": item["id"]}
        yield self._tell(f"{_SEARCH}.completed", **place)
        yield self._tell("response.output_item.done", output_index=0, item=item)

    def _place(self) -> Json:
        assert self._open is not None
        return {"output_index": self._open, "item_id": self.output[self._open]["id"]}

    def _tell(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return event


def hide_results(search: Json, *, shows_results: bool) -> Json:
    """Return the item of a search whose results, if they are to be told, are not known yet."""
    return search | {"results": [] if shows_results else None}


def tell_again(kept: Json, steps: Iterable[Step]) -> Iterator[Json]:
    """Yield the events of a response, up to its end if it has ended, as they were told."""
    unfinished: Json = {"status": "in_progress", "output": [], "usage": None, "error": None}
    unfinished |= {"completed_at": None, "incomplete_details": None}
    first = kept["output"][0] if kept["output"] else None
    search = first if first is not None and first["type"] == "file_search_call" else None
    beginning = {k: v for k, v in kept.items() if k not in ("rapid", "metrics")} | unfinished
    shows_results = search is not None and search.get("results") is not None
    hidden = search and hide_results(search, shows_results=shows_results)
    growing = GrowingResponse(beginning, hidden, shows_results=shows_results)
    if kept.get("background"):
        yield from growing.queue()
    if kept["status"] == "queued":
        return
    yield from growing.begin()
    at: dict[int, tuple[int, int]] = {}
    for place, num_chars, num_logprobs in steps:
        item, begins = kept["output"][place], place not in at
        chars, logprobs = at.get(place, (0, 0))
        at[place] = stop, last = chars + num_chars, logprobs + num_logprobs
        if item["type"] == "function_call":
            piece = item["arguments"][chars:stop]
            yield from growing.add_call(item["call_id"], item["name"], piece, begins=begins)
        elif item["type"] == "reasoning":
            yield from growing.add_thoughts(item["content"][0]["text"][chars:stop])
        else:
            part = item["content"][0]
            yield from growing.add_text(part["text"][chars:stop], part["logprobs"][logprobs:last])
    if kept["status"] in ("failed", "cancelled"):
        yield from growing.break_off(kept["status"], kept["error"])
    elif kept["status"] != "in_progress":
        yield from growing.end(kept)
