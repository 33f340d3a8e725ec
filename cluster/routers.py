"""The routers of this process, by the deployment that they route to."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol
from weakref import WeakValueDictionary

from rapid.messages import GenerateRequest, LeaseRequest

Call = LeaseRequest | GenerateRequest | str
"""The first argument of a call of a pool: a request, which has a unique id, or a unique id."""


class PoolRouter(Protocol):
    """What a caller may ask a router of a pool; see `cluster.affinity.AffinityRouter`."""

    @property
    def is_empty(self) -> bool:
        """Whether the pool has no running replica."""
        ...

    @property
    def empty_s(self) -> float | None:
        """Seconds that the pool has had no running replica for; None while it has one."""
        ...

    def can_move(self, request: Call) -> bool:
        """Return whether a request that waits would begin on another replica at once."""
        ...

    def is_stranded(self, request: Call) -> bool:
        """Return whether no replica takes a request, though one should."""
        ...

    def replica_of(self, request: Call) -> str | None:
        """Return the replica that has taken a request."""
        ...

    def forget(self, request: Call) -> None:
        """Forget a request that its caller has given up."""
        ...


_routers: WeakValueDictionary[Hashable, PoolRouter] = WeakValueDictionary()


def add(deployment: Hashable, router: PoolRouter) -> None:
    """Remember the router of a deployment for as long as it lives."""
    _routers[deployment] = router


def find(deployment: Hashable) -> PoolRouter | None:
    """Return the router of a deployment; None if this process has not called it yet."""
    return _routers.get(deployment)
