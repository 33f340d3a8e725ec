"""What is ready: an application whose pools all have replicas, or may rest without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus, ReplicaState

from deployments.orchestrator import readiness as module
from deployments.orchestrator.readiness import readiness


def status(**replicas: int) -> Any:
    deployments = {
        name: SimpleNamespace(
            replica_states={ReplicaState.RUNNING: number}, status=SimpleNamespace(value="HEALTHY")
        )
        for name, number in replicas.items()
    }
    application = SimpleNamespace(status=ApplicationStatus.RUNNING, deployments=deployments)
    return SimpleNamespace(applications={"rapid": application})


@pytest.mark.parametrize(
    ("num_drafters", "may_rest", "is_ready"),
    [(1, (), True), (0, (), False), (0, ("drafter",), True), (0, ("target",), False)],
)
async def test_a_pool_at_rest_is_ready_if_it_may_rest(
    monkeypatch: pytest.MonkeyPatch, num_drafters: int, may_rest: tuple[str, ...], is_ready: bool
) -> None:
    monkeypatch.setattr(module.serve, "status", lambda: status(Target=1, Drafter=num_drafters))
    monkeypatch.setattr(module, "engines_of", lambda app: {})
    monkeypatch.setattr(module, "metrics_urls", list)
    state = await readiness("rapid", may_rest)
    assert state["ready"] == is_ready
    assert state["pools"]["drafter"]["replicas"] == num_drafters
