"""The replica of an engine's pool starts the engine that its settings describe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.leases import Granted
from cluster.placement import PoolConfig
from deployments.pools import leasing_replica
from rapid.config import EngineConfig
from tests.fakes import FakeEngine


async def test_it_leases_out_the_engine_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []
    calls: list[str] = []

    def method(name: str) -> SimpleNamespace:
        async def answered(*_: object) -> None:
            calls.append(name)

        return SimpleNamespace(remote=lambda *args: answered(*args) if name != "release" else None)

    engine = SimpleNamespace(**{name: method(name) for name in ("open", "wait_closed", "release")})

    def start(*args: object) -> SimpleNamespace:
        started.append(args)
        return engine

    monkeypatch.setattr(leasing_replica, "start_engine", start)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr(leasing_replica, "log_with_serve", lambda: None)
    monkeypatch.setattr(leasing_replica.serve, "get_replica_context", lambda: context)
    config, pool = EngineConfig(model="none"), PoolConfig()
    made = leasing_replica.EngineReplica(config, pool, FakeEngine, "m")
    assert started == [(config, pool, FakeEngine, "m")]
    granted = [each async for each in made.lease(SimpleNamespace(lease_id="a", affinity=""))]
    assert granted == [None, Granted(engine, "r1")]
    assert calls == ["open", "wait_closed"]
