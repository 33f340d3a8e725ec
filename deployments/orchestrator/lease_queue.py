"""The requests of one orchestrator that wait for a lease of one pool."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager, AbstractContextManager

from rapid.engine_status import LeaseUsage
from rapid.errors import Overloaded, TooManyRequests
from rapid.estimators import Turnover
from rapid.fair_queue import FairQueue
from rapid.messages import LeaseRequest
from rapid.ports import Clock

_ASKING_AT_ONCE = 4  # requests of a process in Serve's own queue for a pool


class LeaseQueue:
    """Requests in lines of tenants, from which a few at once stand in Serve's own queue.

    Serve's queue is first come, first served. It is kept short, and not skipped, because only it
    knows when a replica has a free slot. Next is the tenant whose leases have used the least.
    """

    def __init__(self, max_waiting: int, *, clock: Clock = time.monotonic) -> None:
        """Create an empty queue for at most `max_waiting` requests."""
        self._turns = FairQueue(_ASKING_AT_ONCE, max_waiting)
        self._turnover = Turnover(clock)

    def admit(self, max_waiting: int) -> None:
        """Let so many requests wait from now on; those that wait already stay in their lines."""
        self._turns.max_waiting = max_waiting

    def check_room(self, request: LeaseRequest) -> None:
        """Raise an error if a request may not even wait; one that has begun its answer always may.

        Raises:
            TooManyRequests: Others of the tenant wait, and there is no more room for it.
            Overloaded: There is no room for anybody.
        """
        refusal = self._turns.refusal(request.terms.tenant)
        if request.committed or refusal is None:
            return
        if refusal == "tenant":
            raise TooManyRequests("Too many of your requests wait already.", self.retry_after_s)
        raise Overloaded("Too many requests wait already.", self.retry_after_s)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait."""
        return self._turns.num_waiting

    def turn(self, request: LeaseRequest) -> AbstractAsyncContextManager[None]:
        """Return the context in which a request may stand in Serve's queue."""
        terms = request.terms
        is_first, priority = bool(request.committed), terms.priority
        return self._turns.turn(terms.tenant, terms.weight, is_first=is_first, priority=priority)

    def charge(self, request: LeaseRequest, used: LeaseUsage) -> None:
        """Charge what a lease used of its engine to its tenant."""
        self._turns.charge(request.terms.tenant, used.busy_s)

    def hold(self) -> AbstractContextManager[None]:
        """Return the context in which a lease is held, for the pace of the queue."""
        return self._turnover.hold()

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until those who wait have had their leases, by the pace of late."""
        turns = self._turns
        return self._turnover.seconds_until(turns.num_waiting + turns.num_inside + 1)
