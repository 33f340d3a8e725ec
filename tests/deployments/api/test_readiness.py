"""What is ready: an application that would answer a request, whatever Serve calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ReplicaState

from deployments.api import readiness as module
from deployments.api.readiness import Readiness, pools_of, would_answer


def pools(status: str = "UNHEALTHY", **replicas: int) -> Any:
    return {name: {"replicas": number, "status": status} for name, number in replicas.items()}


@pytest.mark.parametrize(
    ("seen", "is_ready"),
    [
        (pools(target=1, orchestrator=1, drafter=1), True),
        (pools(target=1, orchestrator=1, drafter=0, retriever=0), True),
        (pools(target=0, orchestrator=1, drafter=1), False),
        (pools(target=1, orchestrator=0), False),
        (pools("HEALTHY", target=0, orchestrator=1), True),
        (pools("UPSCALING", target=0, orchestrator=1), True),
        (pools("UPDATING", target=0, orchestrator=1), False),
        (pools(orchestrator=1), False),
        ({}, False),
    ],
)
def test_a_request_needs_a_target_and_an_orchestrator(seen: Any, is_ready: bool) -> None:
    assert would_answer(seen) == is_ready


def test_a_snapshot_is_believed_for_thirty_seconds() -> None:
    now = [100.0]
    found: list[Any] = [(pools(target=1, orchestrator=1), ["http://a:9100/metrics"])]
    engines = [{"name": "target/1", "leases_open": 3}]
    readiness = Readiness(
        "rapid",
        look_at_pools=lambda app: found[0],
        look_at_engines=lambda app: engines,
        clock=lambda: now[0],
    )
    assert not readiness.state()["ready"]
    readiness.refresh_pools()
    readiness.refresh_engines()
    state = readiness.state()
    assert state["ready"]
    assert (state["pools"], state["metrics"]) == found[0]
    assert state["engines"] == engines
    now[0] = 130.0
    assert readiness.state()["ready"]
    now[0] = 130.1
    assert not readiness.state()["ready"]
    found[0] = (pools(target=0, orchestrator=1), [])
    readiness.refresh_pools()
    assert not readiness.state()["ready"]


def test_an_application_that_serve_calls_unhealthy_is_seen_by_its_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = SimpleNamespace(
        replica_states={ReplicaState.RUNNING: 1, ReplicaState.STARTING: 1},
        status=SimpleNamespace(value="UNHEALTHY"),
    )
    application = SimpleNamespace(status="UNHEALTHY", deployments={"Target": target})
    status = SimpleNamespace(applications={"rapid": application})
    monkeypatch.setattr(module.serve, "status", lambda: status)
    node = {"NodeManagerAddress": "10.0.0.1", "MetricsExportPort": 9100, "Alive": True}
    monkeypatch.setattr(module.ray, "nodes", lambda: [node, node | {"Alive": False}])
    seen, metrics = pools_of("rapid")
    assert seen["target"] == {
        "replicas": 1,
        "starting": 1,
        "stopping": 0,
        "status": "UNHEALTHY",
    }
    assert metrics == ["http://10.0.0.1:9100/metrics"]
