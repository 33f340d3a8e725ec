"""When a replica ends with its engine, on an engine that is a task of this process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.leases import LeasingReplica
from deployments.pools.engine_actor import EngineActor
from rapid.config import EngineConfig
from rapid.errors import EngineFailed
from tests.fakes import FakeEngine
from tests.local_pools import LocalActor


class Ended(BaseException):
    """The process would have ended."""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines that were killed; then the process ends."""
    killed: list[Any] = []

    def leave(status: int) -> None:
        raise Ended

    monkeypatch.setattr("cluster.leases.ray.kill", killed.append)
    monkeypatch.setattr("cluster.leases.os._exit", leave)
    monkeypatch.setattr("cluster.leases._PING_TIMEOUT_S", 0.05)
    return killed


@pytest.fixture
def engine() -> LocalActor:
    return LocalActor(EngineActor(EngineConfig(model="fake", max_context=64), FakeEngine))


async def healthy(engine: LocalActor) -> LeasingReplica:
    replica = LeasingReplica(lambda: engine)  # type: ignore[arg-type, return-value]
    for _ in range(2):
        await replica.check_health()
    return replica


async def test_a_replica_ends_when_its_engine_closes(engine: LocalActor, ended: list[Any]) -> None:
    replica = await healthy(engine)
    assert ended == []
    engine.actor._engine.closed.set()
    assert replica._fate is not None
    with pytest.raises(Ended):
        await replica._fate
    assert ended == [engine]
    with pytest.raises(EngineFailed):
        await replica.check_health()


async def test_a_replica_ends_when_its_engine_dies(engine: LocalActor, ended: list[Any]) -> None:
    replica = await healthy(engine)
    await asyncio.sleep(0)
    engine.kill()
    assert replica._fate is not None
    with pytest.raises(Ended):
        await replica._fate


async def test_a_replica_ends_when_its_engine_does_not_answer(
    engine: LocalActor, ended: list[Any]
) -> None:
    replica = await healthy(engine)
    engine.stop()
    with pytest.raises(Ended):
        await replica.check_health()
    assert ended == [engine]


async def test_a_model_may_take_long_to_load(engine: LocalActor, ended: list[Any]) -> None:
    engine.stop()
    replica = LeasingReplica(lambda: engine)  # type: ignore[arg-type, return-value]
    loading = asyncio.create_task(replica.check_health())
    await asyncio.sleep(0.2)
    assert not loading.done()
    assert ended == []
    loading.cancel()
