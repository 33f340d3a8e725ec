"""Admission of chat requests to one ingress: how many at once, and how many of a tenant."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rapid.errors import Overloaded, TooManyRequests
from rapid.estimators import Turnover
from rapid.ports import Clock


class Admission:
    """Places for the chat requests in progress, of which a tenant may take a part.

    Nothing waits here: a request that finds no place is refused before its body is read. Refusals
    say when a place becomes free, by the pace at which the requests before it ended.
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        """Create no places; `limit` gives their number."""
        self._max_requests = self._max_per_tenant = 0
        self._turnover = Turnover(clock)
        self._num_held = Counter[str]()

    def limit(self, max_requests: int, max_per_tenant: int) -> None:
        """Set the numbers of places; requests that hold one keep it.

        Args:
            max_requests: Most requests at once.
            max_per_tenant: Most requests at once of one tenant.
        """
        self._max_requests = max_requests
        self._max_per_tenant = max_per_tenant

    @contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Hold a place for the duration of the context.

        Raises:
            TooManyRequests: The tenant holds as many places as it may.
            Overloaded: All places are held.
        """
        num_own = self._num_held[tenant]
        if num_own >= self._max_per_tenant:
            raise TooManyRequests(
                f"You have {num_own} requests in progress, which is the most that one tenant may "
                "have: wait for one of them.",
                self._turnover.seconds_until(share=num_own),
            )
        if self._num_held.total() >= self._max_requests:
            raise Overloaded("The server is busy.", self.retry_after_s)
        self._num_held[tenant] += 1
        try:
            with self._turnover.held():
                yield
        finally:
            self._num_held[tenant] -= 1
            self._num_held += Counter()  # drops who holds nothing

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until a request in progress ends, by the pace of late; None if none is."""
        return self._turnover.seconds_until()
