"""A bounded number of places that tenants take in turns, and a bounded line for them.

A queue that is first come, first served gives all places to whoever asks most. Here everyone waits
in the line of their tenant, and a place that becomes free goes to the tenant that was charged the
least work, by weight (`rapid.work_shares`); among equals, to the line that has had its turn longest
ago. No line is longer than the number of waiters that there is still room for: one tenant fills
half of the room at most, a second one half of the rest, and so on (the dynamic thresholds of
Choudhury and Hahne, 1998). So there is room for a tenant that asks little.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

from rapid.work_shares import WorkShares

Refusal = Literal["tenant", "all"]


class _RankedTicket(asyncio.Future[None]):
    """A task's place in its line; the smallest rank is the head."""

    def __init__(self, rank: float) -> None:
        super().__init__()
        self.rank = rank


class FairQueue:
    """Places for one event loop's tasks. A task that is cancelled leaves its line at once.

    `max_waiting` tasks may wait, or any number if it is None. It may be set at any time, and those
    that wait then stay.
    """

    def __init__(self, num_places: int, max_waiting: int | None = None) -> None:
        self._num_places = self._num_free = num_places
        self.max_waiting = max_waiting
        self._lines: dict[str, list[_RankedTicket]] = {}  # in the order of turns
        self._shares = WorkShares()  # of those who wait

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
    async def turn(
        self, tenant: str, weight: int = 1, *, is_first: bool = False, priority: int = 0
    ) -> AsyncIterator[None]:
        """Hold a place for the duration of the context; see `enter`."""
        await self.enter(tenant, weight, is_first=is_first, priority=priority)
        try:
            yield
        finally:
            self.leave()

    async def enter(
        self, tenant: str, weight: int = 1, *, is_first: bool = False, priority: int = 0
    ) -> None:
        """Wait in the line of `tenant`, or at its head, for a place; `leave` gives it back.

        In its line a smaller `priority` comes first; other tenants' lines do not know it.
        """
        if self._num_free:
            self._num_free -= 1
            return
        ticket = self._queue(tenant, weight, is_first=is_first, priority=priority)
        await self._wait(tenant, ticket)

    def charge(self, tenant: str, work: float) -> None:
        """Charge the work of a turn, in one unit for all; it counts while somebody waits."""
        self._shares.charge(tenant, work)

    @contextmanager
    def stay(self, tenant: str, weight: int = 1) -> Iterator[None]:
        """Count a tenant as present while it has work of several parts, between which it waits.

        Else it would be new at each part, level with those who wait, whatever its weight is.
        """
        self._shares.enter(tenant, weight)
        try:
            yield
        finally:
            self._shares.leave(tenant)

    async def give_way(self, tenant: str, weight: int = 1) -> None:
        """Give a place to the line whose turn it is, and take one again at the head of the own.

        Work of several parts lets other tenants in between two of them, and none of its own.
        """
        ticket = self._queue(tenant, weight, is_first=True, priority=0)
        self.leave()
        await self._wait(tenant, ticket)

    def _queue(self, tenant: str, weight: int, *, is_first: bool, priority: int) -> _RankedTicket:
        self._shares.enter(tenant, weight)
        ticket = _RankedTicket(-math.inf if is_first else priority)
        line = self._lines.setdefault(tenant, [])
        if is_first:
            line.insert(0, ticket)
        else:
            bisect.insort(line, ticket, key=lambda each: each.rank)
        return ticket

    async def _wait(self, tenant: str, ticket: _RankedTicket) -> None:
        try:
            await ticket
        except asyncio.CancelledError:
            if not ticket.cancelled():  # the place came in the same moment
                self.leave()
            elif ticket in (line := self._lines.get(tenant, [])):
                line.remove(ticket)
                self._shares.leave(tenant)
                if not line:
                    del self._lines[tenant]
            raise

    def leave(self) -> None:
        """Give a place to the line whose turn it is."""
        while self._lines:
            tenant = min(self._lines, key=self._shares.level)  # the first of equals
            line = self._lines.pop(tenant)
            ticket = line.pop(0)
            self._shares.leave(tenant)
            if line:
                self._lines[tenant] = line
            if not ticket.done():  # a cancelled one, whose task has not run since
                ticket.set_result(None)
                return
        self._num_free += 1
