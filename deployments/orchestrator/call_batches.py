"""Calls of an engine that travel together: the end of those who call.

Loops of one process that call the same engine in one turn of the event loop share an actor call
(`deployments.pools.shared_calls`), because an actor call costs both processes more than the rest of
a round. A call that is alone in its turn goes by itself. So loops share the more calls the busier
their process is, and one that is alone makes the same calls as without this.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from ray import ObjectRef
from ray.actor import ActorHandle

from cluster.remote_failures import FailureKind, failure_of
from cluster.serve_internals import actor_id
from deployments.pools.shared_calls import Asked, EndedCall, Method
from rapid.errors import DrafterUnavailable, EngineFailed

logger = logging.getLogger(__name__)

_CALLER = uuid.uuid4().hex  # this process
_tickets = itertools.count()


@dataclass(frozen=True, slots=True)
class CallSlot:
    """A block among those that travelled together, which this process does not open."""

    blocks: ObjectRef
    index: int


class Call:
    """A call that is sent at the end of this turn of the event loop; awaited, it is the answer.

    The answer of a draft that has travelled with others is its `CallSlot`.
    """

    def __init__(
        self, method: Method, arguments: tuple[Any, ...], block: CallSlot | None = None
    ) -> None:
        self.method, self.arguments, self.block = method, arguments, block
        self._sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._sent.add_done_callback(_retrieve)
        self._is_alone = False

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the answer; to cancel this cancels the waiting only."""
        found = yield from self.await_reference().__await__()
        if self._is_alone:
            found = yield from found.__await__()
        elif isinstance(found, CallSlot):
            yield from found.blocks.__await__()  # the block has not come before its bytes have
        return found

    async def await_reference(self) -> Any:
        """Return the reference of a call that goes by itself; wait for the answer of another."""
        return await asyncio.shield(self._sent)

    def goes_alone(self, reference: Awaitable[Any]) -> None:
        """Note that the call has gone by itself."""
        self._is_alone = True
        self._sent.set_result(reference)

    def answer(self, value: Any) -> None:
        """Give the answer of a call that has travelled with others."""
        self._sent.set_result(value)

    def fail(self, error: Exception) -> None:
        """Give the error that the call has ended with."""
        self._sent.set_exception(error)

    def lose(self, error: Exception) -> None:
        """Give the error of what the call travelled with: a drafter's costs its help alone."""
        if self.method == "draft" and failure_of(error).actor_id is None:
            error = DrafterUnavailable("The drafter did not answer.")
        self.fail(error)


class SharedCalls:
    """The calls of one engine by all loops of this process."""

    def __init__(self, engine: ActorHandle) -> None:
        """Store the engine's handle."""
        self._engine = engine
        self._queue: list[Call] = []
        self._waiting: dict[int, Call] = {}
        self._num_exchanges = 0
        self._is_asking = False  # whether an exchange that brings no call is the only one

    def ask(self, method: Method, *arguments: Any, block: CallSlot | None = None) -> Call:
        """Call a method of the engine, together with the other calls of this turn."""
        call = Call(method, arguments, block)
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._send)
        self._queue.append(call)
        return call

    def _send(self) -> None:
        queue, self._queue = self._queue, []
        if len(queue) == 1 and queue[0].block is None:
            self._send_alone(queue[0])
            return
        by_blocks: dict[ObjectRef | None, list[Call]] = {}
        for call in queue:
            by_blocks.setdefault(call.block and call.block.blocks, []).append(call)
        for blocks, calls in by_blocks.items():
            self._exchange(calls, blocks)

    def _send_alone(self, call: Call) -> None:
        try:
            reference = getattr(self._engine, call.method).remote(*call.arguments)
        except Exception as error:  # Ray refused to send it
            call.fail(error)
        else:
            call.goes_alone(reference)

    def _exchange(self, calls: Sequence[Call], blocks: ObjectRef | None = None) -> None:
        asked = {}
        for call in calls:
            ticket = next(_tickets)
            place = None if call.block is None else call.block.index
            asked[ticket] = Asked(ticket, call.method, call.arguments, place)
            self._waiting[ticket] = call
        beside = () if blocks is None else blocks
        try:
            ended, drafted = self._engine.exchange.remote(_CALLER, list(asked.values()), beside)
        except Exception as error:
            self._lose(tuple(asked), error)
            return
        self._is_asking = not calls and not self._num_exchanges
        self._num_exchanges += 1
        answer = asyncio.ensure_future(ended)
        has_blocks = blocks is not None
        answer.add_done_callback(partial(self._receive, tuple(asked), has_blocks, drafted))

    def _receive(
        self,
        asked: tuple[int, ...],
        has_blocks: bool,
        drafted: ObjectRef,
        answer: asyncio.Future[list[EndedCall]],
    ) -> None:
        self._num_exchanges -= 1
        if answer.cancelled():  # this process ends
            return
        try:
            self._deliver(answer.result(), drafted)
        except Exception as error:
            failure = failure_of(error)
            is_engines = failure.is_death_of(self._engine)
            if not has_blocks:  # which are lost with another machine, or with a drafter
                is_engines |= failure.kind in (FailureKind.DIED, FailureKind.OBJECT_LOST)
            if is_engines and failure.kind is FailureKind.OBJECT_LOST:
                error = EngineFailed("The engine's answer was lost.")
            self._lose(() if is_engines else asked, error)
        if self._waiting and not self._num_exchanges:
            self._exchange(())

    def _deliver(self, ended: list[EndedCall], drafted: ObjectRef) -> None:
        if not ended and self._is_asking:  # it works on none of these
            self._lose((), EngineFailed("The engine has no answer."))
        for ticket, value, error, place in ended:
            call = self._waiting.pop(ticket, None)
            if call is None:
                continue
            if error is not None:
                call.fail(error)
            else:
                call.answer(value if place is None else CallSlot(drafted, place))

    def _lose(self, tickets: Sequence[int], error: Exception) -> None:
        """End calls by an error of what they travelled with; none given are all that wait."""
        logger.warning("calls of an engine are lost: %r", error)
        for ticket in tickets or tuple(self._waiting):
            if call := self._waiting.pop(ticket, None):
                call.lose(error)


_of_engines: WeakValueDictionary[str, SharedCalls] = WeakValueDictionary()


def find_shared_calls(engine: ActorHandle) -> SharedCalls:
    """Return the calls of an engine, the same for all who ask while one of them keeps it."""
    name = actor_id(engine)
    calls = _of_engines.get(name)
    if calls is None:
        calls = _of_engines[name] = SharedCalls(engine)
    return calls


def _retrieve(sent: asyncio.Future[Any]) -> None:
    """Retrieve an error that nobody may wait for any more, so that asyncio does not report it."""
    if not sent.cancelled():
        sent.exception()
