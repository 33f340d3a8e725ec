"""Admission of chat requests to one ingress: how many at once, and how many of a tenant."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from deployments.api.shares import Shares
from rapid.errors import Overloaded, TooManyRequests
from rapid.estimators import Turnover
from rapid.ports import Clock

_LONGEST_WAIT_S = 60.0  # the longest Retry-After that the SDK of OpenAI follows
_ANYBODY = ""


class Admission:
    """Places for the chat requests in progress, of which a tenant may take its share.

    Nothing waits here: a request that finds no place is refused before its body is read. Refusals
    say when a place becomes free, by the pace at which the requests before it ended; one refusal
    names one place and the next the one after, so that a crowd does not come back all at once.

    Attributes:
        shares: The tenants' shares, which other replicas of the ingress add to.
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        """Create no places; `limit` gives their number."""
        self.shares = Shares(clock)
        self._clock = clock
        self._max_requests = self._num_held = 0
        self._turnover = Turnover(clock)
        self._told: dict[str, deque[float]] = {}  # when who was refused may come, by tenant

    def limit(self, max_requests: int, max_per_tenant: int, shared: int | None = None) -> None:
        """Set the numbers of places; requests that hold one keep it.

        Args:
            max_requests: Most requests at once, here.
            max_per_tenant: Most requests at once of one tenant, at all replicas.
            shared: Requests that tenants share; None if there is one tenant only.
        """
        self._max_requests = max_requests
        self.shares.configure(max_per_tenant, shared)

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Hold a place for the duration of the context.

        Raises:
            TooManyRequests: The tenant holds as many places as it may.
            Overloaded: All places are held.
        """
        if not self.shares.admits(tenant):
            num_own = self.shares.num_held(tenant)
            raise TooManyRequests(
                f"You have {num_own} requests in progress, which is the most that one tenant may "
                "have now: wait for one of them.",
                self._next_place_s(tenant, num_own),
            )
        if self._num_held >= self._max_requests:
            raise Overloaded("The server is busy.", self.next_place_s())
        self._num_held += 1
        try:
            with self._turnover.held(), self.shares.held(tenant):
                yield
        finally:
            self._num_held -= 1

    def next_place_s(self) -> float | None:
        """Return in how many seconds a place becomes free that nobody was told of yet.

        None is returned while no place is held.
        """
        return self._next_place_s(_ANYBODY, None)

    def _next_place_s(self, who: str, num_own: int | None) -> float | None:
        now = self._clock()
        told = self._told.setdefault(who, deque())
        while told and told[0] <= now:
            told.popleft()
        wait_s = self._turnover.seconds_until(len(told) + 1, share=num_own)
        if wait_s is None:
            return None
        wait_s = min(wait_s, _LONGEST_WAIT_S)
        told.append(max(now + wait_s, told[-1] if told else 0.0))
        return wait_s
