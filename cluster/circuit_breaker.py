"""Replicas that have just failed a request, which the routers of this process leave alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from rapid.ports import Clock

_BLAMED_S = 10.0  # in which a broken replica is replaced


class HasReplicaId(Protocol):
    """A candidate of Serve's request router."""

    @property
    def replica_id(self) -> Any:
        """Serve's id of the replica, whose `unique_id` is a string."""
        ...


Candidate = TypeVar("Candidate", bound=HasReplicaId)


class CircuitBreaker:
    """Times at which replicas failed; for ten seconds after a failure a replica is spared."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def put(self, replica: str) -> None:
        """Record that a replica, by its unique id, failed a request."""
        # Where steps fail, answers come sooner than elsewhere, so that it looks the least busy.
        now = self._clock()
        self._until = {each: end for each, end in self._until.items() if end > now}
        self._until[replica] = now + _BLAMED_S

    def is_open(self, replica: str) -> bool:
        """Return whether a replica, by its unique id, has just failed."""
        return self._until.get(replica, 0.0) > self._clock()

    def spare(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that have not just failed, or all if there is no other."""
        good = [each for each in candidates if not self.is_open(each.replica_id.unique_id)]
        return good or list(candidates)


CIRCUITS = CircuitBreaker()
"""The blame that the callers and the routers of this process share."""
