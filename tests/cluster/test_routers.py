"""Routers as their process finds them, and what a lease that waits asks of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster import affinity
from cluster.leases import Granted, hold
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import DrafterUnavailable, Overloaded
from rapid.messages import LeaseRequest, Terms, as_prompt
from tests.local_pools import LocalActor, LocalStream

REQUEST = LeaseRequest(
    "asked", Terms("local", SamplingConfig(), SpeculationConfig(), 50), as_prompt(range(100))
)


class Router:
    """Says that a lease could move, from the second time on that it is asked."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.has_room = has_room
        self.asked: list[str] = []
        self.is_empty = False
        self.empty_s: float | None = None

    def can_move(self, request: LeaseRequest) -> bool:
        self.asked.append(request.lease_id)
        return self.has_room and len(self.asked) > 1


class Engine:
    def __init__(self) -> None:
        self.released: list[str] = []

    async def release(self, lease_id: str) -> None:
        self.released.append(lease_id)

    async def renew(self, lease_id: str) -> None:
        pass


class Pool:
    """The first lease that is asked for waits for ever, the others open."""

    deployment_name = "Target"
    deployment_id = "a pool"

    def __init__(self) -> None:
        self.engine = LocalActor(Engine())
        self.given_up: list[str] = []
        self.num_asked = 0
        self.has_replicas = True

    def options(self, **_: Any) -> Pool:
        return self

    def remote(self, request: LeaseRequest) -> Any:
        self.num_asked += 1
        if self.num_asked > 1:
            return LocalStream(self._open())
        return Queue(self, request.lease_id)

    async def _open(self) -> AsyncIterator[Any]:
        yield None
        yield Granted(self.engine, "r1")


class Queue:
    """A stream of a replica that has taken a request, or of none, and has no room for it."""

    def __init__(self, pool: Pool, lease_id: str) -> None:
        self._pool, self._lease_id = pool, lease_id
        self._is_taken = pool.has_replicas

    async def __anext__(self) -> Any:
        if not self._is_taken:
            await asyncio.Event().wait()
        self._is_taken = False

    def cancel(self) -> None:
        self._pool.given_up.append(self._lease_id)


@pytest.fixture(name="pool")
def _pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr("cluster.leases._LOOK_S", 0.01)
    return Pool()


async def test_a_lease_leaves_a_queue_once_another_replica_has_room(pool: Pool) -> None:
    router = Router()
    affinity.add_router("a pool", router)
    async with hold(pool, REQUEST, timeout_s=30, renew_every_s=9) as held:  # type: ignore[arg-type]
        assert held.lease_id == "asked.1"
    assert router.asked == ["asked.0", "asked.0"]
    assert pool.given_up == ["asked.0"]


async def test_where_no_other_has_room_it_waits_in_its_queue(pool: Pool) -> None:
    router = Router(has_room=False)
    affinity.add_router("a pool", router)
    with pytest.raises(Overloaded, match="full"):
        async with hold(pool, REQUEST, timeout_s=0.3, renew_every_s=9):  # type: ignore[arg-type]
            pass
    assert pool.num_asked == 1
    assert pool.given_up == ["asked.0"]


async def test_a_pool_that_has_no_replica_yet_is_loading_and_not_full(pool: Pool) -> None:
    router = Router(has_room=False)
    router.empty_s, pool.has_replicas = 40.4, False
    affinity.add_router("a pool", router)
    with pytest.raises(Overloaded, match=r"Target pool is still loading \(40 s so far\)"):
        async with hold(pool, REQUEST, timeout_s=0.1, renew_every_s=9):  # type: ignore[arg-type]
            pass


async def test_a_pool_without_a_replica_is_not_waited_for_where_it_may_rest(pool: Pool) -> None:
    router = Router(has_room=False)
    router.is_empty, pool.has_replicas = True, False
    affinity.add_router("a pool", router)
    with pytest.raises(DrafterUnavailable, match="has no replica yet"):
        async with hold(
            pool,  # type: ignore[arg-type]
            REQUEST,
            timeout_s=30,
            renew_every_s=9,
            lost=DrafterUnavailable,
            may_rest=True,
        ):
            pass
    assert pool.num_asked == 1  # which is what starts a replica
    assert pool.given_up == ["asked.0"]


def test_a_router_is_found_while_it_lives() -> None:
    router = Router()
    affinity.add_router("another pool", router)
    assert affinity.find_router("another pool") is router
    assert affinity.find_router("unknown") is None
    del router
    gc.collect()
    assert affinity.find_router("another pool") is None
