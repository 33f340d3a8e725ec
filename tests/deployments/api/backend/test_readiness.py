"""What is ready: an application that would answer a request, whatever Serve calls it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ReplicaState

from deployments.api.backend import readiness as module
from deployments.api.backend.readiness import Readiness, pools_of

NEEDED = {"orchestrator": "target"}


class Parts:
    """Stands in for `Signs`, and for the clock: who lives is written by hand."""

    def __init__(self, *silent: str) -> None:
        self.silent, self.gone = set(silent), "silent"
        self.now = 100.0

    def standing(self, pool: str, *, is_engine: bool) -> str:
        part = f"{pool} {'engine' if is_engine else 'replica'}"
        return self.gone if part in self.silent else "alive"

    def engines(self) -> list[dict[str, Any]]:
        return [{"name": "target/1", "leases_open": 3}]

    def passages(self) -> list[dict[str, Any]]:
        return [{"name": "orchestrator/1", "reading": "apart", "reason": "measured"}]

    def find(self) -> None: ...

    def ask(self) -> None: ...


def pools(status: str = "UNHEALTHY", **replicas: int) -> Any:
    return {name: {"replicas": number, "status": status} for name, number in replicas.items()}


def readiness_of(seen: Any, parts: Parts) -> Readiness:
    readiness = Readiness(
        "rapid",
        NEEDED,
        look_at_pools=lambda app: (seen, ["http://a:9100/metrics"]),
        signs=parts,  # type: ignore[arg-type]
        clock=lambda: parts.now,
    )
    assert not readiness.state("orchestrator")["ready"]
    readiness.refresh_pools()
    return readiness


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
    assert readiness_of(seen, Parts()).state("orchestrator")["ready"] == is_ready


def test_the_state_shows_pools_engines_and_metrics() -> None:
    seen = pools(target=1, orchestrator=1)
    state = readiness_of(seen, Parts()).state("orchestrator")
    assert state["pools"] == seen
    assert state["engines"] == [{"name": "target/1", "leases_open": 3}]
    assert state["passages"][0]["reading"] == "apart"
    assert state["metrics"] == ["http://a:9100/metrics"]


@pytest.mark.parametrize("silent", ["target engine", "target replica", "orchestrator replica"])
def test_replicas_that_are_silent_answer_nobody_whatever_serve_says(silent: str) -> None:
    parts = Parts(silent)
    readiness = readiness_of(pools("HEALTHY", target=1, orchestrator=1), parts)
    assert not readiness.state("orchestrator")["ready"]
    readiness.note_progress("orchestrator")  # they are only slow to say so
    parts.now += 5.0
    assert readiness.state("orchestrator")["ready"]
    parts.now += 0.1
    assert not readiness.state("orchestrator")["ready"]
    readiness.note_progress("orchestrator")
    parts.gone = "gone"
    assert not readiness.state("orchestrator")["ready"]


def test_a_model_needs_its_own_orchestrator_and_target() -> None:
    parts = Parts()
    seen = pools(
        "HEALTHY", **{"target-a": 1, "orchestrator-a": 1, "orchestrator-b": 1, "shared": 1}
    )
    readiness = Readiness(
        "rapid",
        {"orchestrator-a": "target-a", "orchestrator-b": "shared"},
        look_at_pools=lambda app: (seen, []),
        signs=parts,  # type: ignore[arg-type]
        clock=lambda: parts.now,
    )
    readiness.refresh_pools()
    parts.silent = {"shared engine"}
    assert readiness.state("orchestrator-a")["ready"]
    assert readiness.state("orchestrator-b")["reason"] == "no shared gives a sign of life"
    readiness.note_progress("orchestrator-a")
    assert not readiness.state("orchestrator-b")["ready"]
    readiness.note_progress("orchestrator-b")  # its engine is only slow to say so
    assert readiness.state("orchestrator-b")["ready"]


@pytest.mark.parametrize("silent", ["drafter engine", "drafter replica", "orchestrator engine"])
def test_who_is_not_needed_may_be_silent(silent: str) -> None:
    parts = Parts(silent)
    state = readiness_of(pools(target=1, orchestrator=1), parts).state("orchestrator")
    assert state["ready"]


def test_while_the_controller_is_away_signs_of_life_are_enough() -> None:
    parts = Parts()
    readiness = readiness_of(pools(target=1, orchestrator=1), parts)
    resting = readiness_of(pools("HEALTHY", target=0, orchestrator=1), parts)
    parts.now += 30.0
    assert resting.state("orchestrator")["ready"]
    parts.now += 570.0
    assert readiness.state("orchestrator")["ready"]
    assert not resting.state("orchestrator")["ready"]  # nobody would start a replica


def test_a_whole_application_is_looked_at_less_often() -> None:
    parts, num_looks = Parts(), 0
    seen = pools("HEALTHY", target=1, orchestrator=1, drafter=0)

    def look(app: str) -> tuple[Any, list[str]]:
        nonlocal num_looks
        num_looks += 1
        return seen, []

    readiness = Readiness(
        "rapid",
        NEEDED,
        look_at_pools=look,
        signs=parts,  # type: ignore[arg-type]
        clock=lambda: parts.now,
    )
    for _ in range(3):
        readiness.refresh_pools()
    assert num_looks == 3  # the drafter has no replica yet
    seen["drafter"]["replicas"] = 1
    for _ in range(11):
        readiness.refresh_pools()
    assert num_looks == 5
    parts.silent = {"target engine"}
    readiness.refresh_pools()
    assert num_looks == 6


def test_one_look_is_enough_to_be_ready_and_what_cannot_be_seen_is_no_error() -> None:
    def broken(app: str) -> Any:
        raise KeyError(app)

    signs: Any = Parts()
    ready = Readiness(
        "rapid",
        NEEDED,
        look_at_pools=lambda app: (pools(target=1, orchestrator=1), []),
        signs=signs,
    )
    ready.look()
    assert ready.state("orchestrator")["ready"]
    blind = Readiness("rapid", NEEDED, look_at_pools=broken, signs=signs)
    blind.look()
    assert not blind.state("orchestrator")["ready"]


def test_nobody_looks_any_more_after_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_EVERY_S", 0.001)
    before = {*threading.enumerate()}
    readiness = Readiness("rapid", NEEDED, look_at_pools=lambda app: ({}, []), signs=Parts())  # type: ignore[arg-type]
    readiness.start()
    looking = {*threading.enumerate()} - before
    assert len(looking) == 3
    readiness.stop()
    for thread in looking:
        thread.join(10)
    assert not any(thread.is_alive() for thread in looking)


def test_an_application_that_serve_calls_unhealthy_is_seen_by_its_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = SimpleNamespace(
        replica_states={
            ReplicaState.RUNNING: 1,
            ReplicaState.RECOVERING: 2,  # by a new controller; they answer
            ReplicaState.UPDATING: 1,
            ReplicaState.STARTING: 1,
        },
        status=SimpleNamespace(value="UNHEALTHY"),
    )
    application = SimpleNamespace(status="UNHEALTHY", deployments={"Target": target})
    status = SimpleNamespace(applications={"rapid": application})
    monkeypatch.setattr(module.serve, "status", lambda: status)
    node = {"NodeManagerAddress": "10.0.0.1", "MetricsExportPort": 9100, "Alive": True}
    monkeypatch.setattr(module.ray, "nodes", lambda: [node, node | {"Alive": False}])
    seen, metrics = pools_of("rapid")
    assert seen["target"] == {
        "replicas": 4,
        "starting": 1,
        "stopping": 0,
        "status": "UNHEALTHY",
    }
    assert metrics == ["http://10.0.0.1:9100/metrics"]
