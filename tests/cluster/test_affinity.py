"""Who takes a request that names what it reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import ReplicaID

from cluster.affinity import AffinityRouter, weight
from cluster.blame import Blame
from cluster.placement import PoolConfig, deployment_options


@dataclass(frozen=True)
class Replica:
    replica_id: ReplicaID


REPLICAS = [Replica(SimpleNamespace(unique_id=name)) for name in "abcd"]  # type: ignore[arg-type]


def router(ongoing: dict[str, int]) -> AffinityRouter:
    """A router that knows how much each replica has to do, without Serve around it."""
    router = object.__new__(AffinityRouter)
    cache = SimpleNamespace(get=lambda replica_id: ongoing.get(replica_id.unique_id))
    router._replica_queue_len_cache = cache
    router.initialize_state(target_ongoing_requests=2)
    return router


async def first_asked(name: str, ongoing: dict[str, int], replicas: list[Any] = REPLICAS) -> Any:
    pending = SimpleNamespace(metadata=SimpleNamespace(session_id=name))
    return (await router(ongoing).choose_replicas(replicas, pending))[0]  # type: ignore[arg-type]


async def test_a_name_has_one_owner_and_names_are_spread() -> None:
    owners = {str(number): await first_asked(str(number), {}) for number in range(200)}
    assert all([await first_asked(name, {}) == owner for name, owner in owners.items()])
    taken = Counter(owner.replica_id.unique_id for (owner,) in owners.values())
    assert set(taken) == set("abcd")
    assert min(taken.values()) > 25


async def test_a_busy_owner_is_not_waited_for() -> None:
    (owner,) = await first_asked("x", {})
    busy = {owner.replica_id.unique_id: 2}
    assert len(await first_asked("x", busy)) == 2
    assert await first_asked("x", {owner.replica_id.unique_id: 1}) == [owner]


async def test_an_owner_that_has_just_failed_a_request_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blame = Blame()
    monkeypatch.setattr("cluster.affinity.BLAME", blame)
    (owner,) = await first_asked("x", {})
    blame.put(owner.replica_id.unique_id)
    (other,) = await first_asked("x", {})
    assert other is not owner
    assert owner not in [each for _ in range(50) for each in await first_asked("", {})]
    assert await first_asked("x", {}, [owner]) == [owner]


async def test_without_a_name_two_are_compared() -> None:
    assert len(await first_asked("", {})) == 2
    assert len(await first_asked("", {}, REPLICAS[:1])) == 1
    assert await router({}).choose_replicas([], None) == []


async def test_a_lost_replica_moves_its_own_names_only() -> None:
    for name in map(str, range(50)):
        (owner,) = await first_asked(name, {})
        rest = [each for each in REPLICAS if each is not REPLICAS[0]]
        if owner is not REPLICAS[0]:
            assert await first_asked(name, {}, rest) == [owner]
    assert weight("x", REPLICAS[0].replica_id) != weight("y", REPLICAS[0].replica_id)


@pytest.mark.ray
async def test_serve_sends_a_name_to_its_owner_until_that_is_busy(ray_cluster: str) -> None:
    class Pool:
        async def who(self, seconds: float) -> str:
            await asyncio.sleep(seconds)
            return serve.get_replica_context().replica_id.unique_id

    pool = PoolConfig(min_replicas=2, max_replicas=2, target_ongoing_requests=2, num_cpus=0.01)
    application = serve.deployment(Pool).options(**deployment_options(pool, max_leases=8)).bind()
    handle: DeploymentHandle = serve.run(application, name="affinity", route_prefix=None)

    def who(name: str, seconds: float = 0.0) -> Any:
        return handle.options(method_name="who", session_id=name).remote(seconds)

    try:
        alone = {name: {await who(name) for _ in range(5)} for name in map(str, range(8))}
        assert all(len(owners) == 1 for owners in alone.values())
        assert len(set.union(*alone.values())) == 2
        await asyncio.sleep(1.0)  # Serve's count of what is going on lags
        busy = [asyncio.ensure_future(who("0", 3.0)) for _ in range(2)]
        await asyncio.sleep(1.0)
        elsewhere = {await who("0") for _ in range(5)}
        assert elsewhere - alone["0"]
        assert set(await asyncio.gather(*busy)) == alone["0"]
    finally:
        serve.delete("affinity")
