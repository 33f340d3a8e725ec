"""The answer to a question in process, complete or piece by piece."""

from __future__ import annotations

import asyncio
import html
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

from rapid.answering.answers import join_neighbours
from rapid.chat_messages import ToolCall
from rapid.errors import BadRequest, RapidError
from rapid.events import (
    LENGTH,
    CallDelta,
    Finished,
    FinishReason,
    GenerationEvent,
    Reading,
    TextDelta,
    ThinkingDelta,
)
from rapid.pair.asking import in_own_words
from rapid.pair.loop_thread import LoopThread
from rapid.receipt import Receipt

OnProgress = Callable[[Reading], None]
"""Function that is told about twice a second how far documents are embedded or read."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer, with the contract under which it was produced.

    Attributes:
        finish_reason: `stop` where the answer ended by itself, `length` where it was cut,
            `tool_calls` where it ended with calls.
        tool_calls: Its calls of tools, as a `Message` takes them.
        thinking: What the model thought before it, where that is told apart.
    """

    text: str
    finish_reason: FinishReason
    receipt: Receipt
    tool_calls: tuple[ToolCall, ...] = ()
    thinking: str = ""

    def _repr_html_(self) -> str:
        """Return the text, the calls and the receipt, which notebooks show."""
        calls = (f"{each.name}({each.arguments})" for each in self.tool_calls)
        shown = "\n".join(filter(None, (self.text, *calls)))
        text = f'<div style="white-space: pre-wrap">{html.escape(shown)}</div>'
        return text + self.receipt._repr_html_()


class Stream(Iterator[str]):
    """An iterator over the pieces of an answer's text, each available once it is final.

    It keeps its leases until it is read to the end, however slowly, or closed. One thread at a time
    may take pieces; any may close.

    Attributes:
        answer: The complete answer once the last piece was taken; None before.
    """

    def __init__(
        self,
        loop: LoopThread,
        events: AsyncGenerator[GenerationEvent],
        on_progress: OnProgress | None = None,
    ) -> None:
        self.answer: Answer | None = None
        self._loop = loop
        self._events = events
        self._on_progress = on_progress
        self._pieces: list[str] = []
        self._calls: list[CallDelta] = []
        self._thoughts: list[str] = []
        self._finish = LENGTH
        self._taking = threading.Lock()
        self._turn = asyncio.Lock()

    def __next__(self) -> str:
        if not self._taking.acquire(blocking=False):
            raise RapidError(
                "another thread waits for a piece of this stream: give each thread its own stream"
            )
        try:
            return self._next()
        except StopIteration:
            raise
        except BadRequest as refused:
            raise in_own_words(refused) from None
        except BaseException:
            self.close()
            raise
        finally:
            self._taking.release()

    def _next(self) -> str:
        while self.answer is None:
            event = self._loop.run(self._event)
            if event is None:  # `close` came first
                break
            if isinstance(event, TextDelta):
                self._pieces.append(event.text)
                self._finish = event.finish_reason or self._finish
                if event.text:
                    return event.text
            elif isinstance(event, Reading):
                if self._on_progress is not None:
                    self._on_progress(event)
            elif isinstance(event, CallDelta):
                self._calls.append(event)
            elif isinstance(event, ThinkingDelta):
                self._thoughts.append(event.text)
            elif isinstance(event, Finished):
                calls = tuple(
                    ToolCall(each.id, each.name, each.arguments)
                    for each in join_neighbours(self._calls)
                    if isinstance(each, CallDelta)
                )
                text, thoughts = "".join(self._pieces), "".join(self._thoughts)
                self.answer = Answer(text, self._finish, event.receipt, calls, thoughts)
                self.close()
        raise StopIteration

    def close(self) -> None:
        """Give up the rest of the answer; no-op on a complete one, or where the pair is closed."""
        try:
            self._loop.run(self._end)
        except RapidError:
            if not self._loop.is_closed:
                raise

    async def _event(self) -> GenerationEvent | None:
        async with self._turn:
            return await anext(self._events, None)

    async def _end(self) -> None:
        async with self._turn:  # after a wait that was interrupted, and releases its leases
            await self._events.aclose()
