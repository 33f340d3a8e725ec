"""Calls of an engine that travel together: the engine's end.

A process sends the calls that its loops make at the same moment in one actor call, an exchange. It
comes back as soon as one of that process's calls has ended, with all that have ended by then, in
this exchange or in others. So a call that takes long, or fails, holds up no other; and calls that
end with one step of the engine come back together. Blocks of `MOST_BYTES` come back at once and the
others next, so that Ray carries them inside its messages and nobody waits for a transfer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, NamedTuple

from deployments.logs import about_lease
from rapid.errors import EngineFailed, RapidError
from rapid.messages import DraftBlock

logger = logging.getLogger(__name__)

Method = Literal["draft", "verify", "decode"]

MOST_BYTES = 65_536  # of blocks in one answer, unless one block is larger
_FORGOTTEN_AFTER_S = 60.0  # a process that fetches nothing for so long has died


class Asked(NamedTuple):
    """A call in an exchange.

    Attributes:
        ticket: The caller's number for the call, never used again.
        method: The engine's method.
        arguments: The method's arguments, but for a block that travels beside them.
        place: Where that block is among the exchange's blocks; None if there is none.
    """

    ticket: int
    method: Method
    arguments: tuple[Any, ...]
    place: int | None = None


class EndedCall(NamedTuple):
    """The outcome of one of the calls that share an actor call.

    Attributes:
        ticket: The caller's number for the call.
        value: What it returned, a verdict; None for a draft.
        error: What it raised.
        place: Where a drafted block is among the blocks that travel beside this.
    """

    ticket: int
    value: Any = None
    error: RapidError | None = None
    place: int | None = None


class Mailboxes:
    """The calls in progress of each process, and those that have ended and are to be fetched."""

    def __init__(self, engine: object) -> None:
        """Store the object whose methods are called."""
        self._engine = engine
        self._boxes: dict[str, _Mailbox] = {}

    async def exchange(
        self, caller: str, calls: Sequence[Asked], blocks: Sequence[DraftBlock]
    ) -> tuple[list[EndedCall], list[DraftBlock]]:
        """Begin calls and return those that have ended, and apart the blocks that were drafted.

        It waits until one has ended, and not at all if the caller waits in more exchanges than it
        has calls in progress.
        """
        box = self._boxes.get(caller)
        if box is None:
            self._forget_the_dead()
            box = self._boxes[caller] = _Mailbox()
        for call in calls:
            arguments = call.arguments
            if call.place is not None:
                arguments = (*arguments[:2], blocks[call.place], *arguments[2:])
            box.begin(call, getattr(self._engine, call.method)(*arguments))
        found = await box.take()
        if box.is_empty:
            self._boxes.pop(caller, None)
        ended: list[EndedCall] = []
        drafted: list[DraftBlock] = []
        for call, value, error in found:
            if error is None and call.method == "draft":
                ended.append(EndedCall(call.ticket, place=len(drafted)))
                drafted.append(value)
            else:
                ended.append(EndedCall(call.ticket, value, error))
        return ended, drafted

    def _forget_the_dead(self) -> None:
        """Drop what was not fetched for long: who asked for it has died."""
        since = time.monotonic() - _FORGOTTEN_AFTER_S
        for caller in [c for c, box in self._boxes.items() if box.is_left_since(since)]:
            del self._boxes[caller]


class _Mailbox:
    """The calls of one process."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._ended: list[tuple[Asked, Any, RapidError | None]] = []
        self._num_waiting = 0
        self._fetched_at = time.monotonic()
        self._news = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in progress, and nothing is to be fetched."""
        return not (self._running or self._ended or self._num_waiting)

    def is_left_since(self, moment: float) -> bool:
        """Return whether nothing was fetched since a moment, and no exchange waits."""
        return not self._num_waiting and self._fetched_at < moment

    def begin(self, call: Asked, running: Coroutine[Any, Any, Any]) -> None:
        """Begin a call."""
        self._running.add(asyncio.create_task(self._run(call, running)))

    async def _run(self, call: Asked, running: Coroutine[Any, Any, Any]) -> None:
        value: Any = None
        error: RapidError | None = EngineFailed("The call was cancelled.")
        try:
            value, error = await running, None
        except RapidError as failed:
            error = failed
        except Exception:
            lease_id = call.arguments[0]
            logger.exception(
                "%s of lease %s failed", call.method, lease_id, extra=about_lease(lease_id)
            )
            error = EngineFailed("The engine failed; its log says why.")
        finally:
            self._ended.append((call, value, error))
            task = asyncio.current_task()
            assert task is not None
            self._running.remove(task)
            self._news.set()

    async def take(self) -> list[tuple[Asked, Any, RapidError | None]]:
        """Return the calls that have ended, waiting for one unless too many exchanges wait."""
        self._num_waiting += 1
        try:
            while not self._ended and self._num_waiting <= len(self._running):
                self._news.clear()
                await self._news.wait()
        finally:
            self._num_waiting -= 1
            self._fetched_at = time.monotonic()
        num_bytes, number = 0, 0
        for number, (call, value, _) in enumerate(self._ended):
            num_bytes += _block_bytes(value) if call.method == "draft" else 0
            if num_bytes > MOST_BYTES and number:
                break
        else:
            number += 1
        ended, self._ended = self._ended[:number], self._ended[number:]
        return ended


def _block_bytes(block: DraftBlock | None) -> int:
    return 0 if block is None else block.candidate_ids.nbytes + block.candidate_probs.nbytes
