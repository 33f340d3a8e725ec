"""A bounded number of places that tenants take in turns, and a bounded line for them.

A queue that is first come, first served gives all places to whoever asks most. Here everyone waits
in the line of their tenant, a place that becomes free goes to the line that has had its turn
longest ago, and no line is longer than the number of waiters that there is still room for: one
tenant fills half of the room at most, a second one half of the rest, and so on (the dynamic
thresholds of Choudhury and Hahne, 1998). So there is room for a tenant that asks little.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

Refusal = Literal["tenant", "all"]


class FairQueue:
    """Places for one event loop's tasks. A task that is cancelled leaves its line at once.

    `max_waiting` tasks may wait, or any number if it is None. It may be set at any time, and those
    that wait then stay.
    """

    def __init__(self, num_places: int, max_waiting: int | None = None) -> None:
        self._num_places = self._num_free = num_places
        self.max_waiting = max_waiting
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of turns

    @property
    def num_waiting(self) -> int:
        """The number of tasks that wait."""
        return sum(map(len, self._lines.values()))

    @property
    def num_inside(self) -> int:
        """The number of tasks that hold a place."""
        return self._num_places - self._num_free

    def refusal(self, tenant: str) -> Refusal | None:
        """Return why no further task of this tenant may wait, or None if one may.

        It is `tenant` where others of the tenant wait and leave no more room for it, and `all`
        where there is no room for anybody.
        """
        if self.max_waiting is None or self._num_free:
            return None
        num_own = len(self._lines.get(tenant, ()))
        if num_own < self.max_waiting - self.num_waiting:
            return None
        return "tenant" if num_own else "all"

    @asynccontextmanager
    async def turn(self, tenant: str, *, is_first: bool = False) -> AsyncIterator[None]:
        """Hold a place for the duration of the context; see `enter`."""
        await self.enter(tenant, is_first=is_first)
        try:
            yield
        finally:
            self.leave()

    async def enter(self, tenant: str, *, is_first: bool = False) -> None:
        """Wait in the line of `tenant`, or at its head, for a place; `leave` gives it back."""
        if self._num_free:
            self._num_free -= 1
            return
        await self._wait(tenant, self._queue(tenant, is_first=is_first))

    async def give_way(self, tenant: str) -> None:
        """Give a place to the line whose turn it is, and take one again at the head of the own.

        Work of several parts lets other tenants in between two of them, and none of its own.
        """
        ticket = self._queue(tenant, is_first=True)
        self.leave()
        await self._wait(tenant, ticket)

    def _queue(self, tenant: str, *, is_first: bool) -> asyncio.Future[None]:
        ticket = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(tenant, deque())
        if is_first:
            line.appendleft(ticket)
        else:
            line.append(ticket)
        return ticket

    async def _wait(self, tenant: str, ticket: asyncio.Future[None]) -> None:
        try:
            await ticket
        except asyncio.CancelledError:
            if not ticket.cancelled():  # the place came in the same moment
                self.leave()
            elif ticket in (line := self._lines.get(tenant, deque())):
                line.remove(ticket)
                if not line:
                    del self._lines[tenant]
            raise

    def leave(self) -> None:
        """Give a place to the line whose turn it is."""
        while self._lines:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            ticket = line.popleft()
            if line:
                self._lines[tenant] = line
            if not ticket.done():  # a cancelled one, whose task has not run since
                ticket.set_result(None)
                return
        self._num_free += 1
