"""Signs of life: who answers counts, who is silent is not waited for and not asked twice."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from deployments.api.backend import heartbeats as module
from deployments.api.backend.heartbeats import Ask, PoolProcess, Signs
from deployments.pools import passage_reports
from rapid.answering.passage_gate import PassageGate
from rapid.engine_status import EngineStatus

ENGINE = PoolProcess("target", "e1", is_engine=True)
REPLICA = PoolProcess("target", "r1", is_engine=False)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Part:
    """A process that answers at once, never, or with an error."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.num_asked = answer, 0
        self.is_stopped = False
        self.pending: Future[Any] = Future()

    def __call__(self) -> Future[Any]:
        self.num_asked += 1
        self.pending = Future()
        if isinstance(self.answer, Exception):
            self.pending.set_exception(self.answer)
        elif not self.is_stopped:
            self.pending.set_result(self.answer)
        return self.pending


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT_S", 0.0)


def status(**fields: Any) -> EngineStatus:
    usual = dict.fromkeys(EngineStatus.__dataclass_fields__, 0)
    return EngineStatus(**(usual | fields))  # type: ignore[arg-type]


def test_one_replica_is_silent_only_while_another_is_not() -> None:
    """If all are silent, it is this process that stands still, or everything is lost anyway."""
    clock = Clock()
    parts = {PoolProcess("orchestrator", name, is_engine=False): Part(True) for name in "ab"}
    signs = Signs(lambda: parts, clock)
    signs.ask()
    one, other = parts.values()
    one.is_stopped = other.is_stopped = True
    clock.now += 10.1
    signs.ask()
    assert not signs.is_silent("orchestrator", "a")
    other.is_stopped = False
    other.pending.set_result(True)
    signs.ask()
    assert signs.is_silent("orchestrator", "a")
    assert not signs.is_silent("orchestrator", "b")
    assert not signs.is_silent("orchestrator", "unknown")
    assert not signs.is_silent("target", "a")


def test_who_is_stopped_is_silent_after_ten_seconds() -> None:
    clock, known = Clock(), dict[PoolProcess, Ask]()
    engine, replica = Part(status(leases_open=3, max_leases=16)), Part(True)
    signs = Signs(lambda: known, clock)
    signs.ask()
    assert signs.standing("target", is_engine=True) == "gone"
    known.update({ENGINE: engine, REPLICA: replica})
    signs.find()
    signs.ask()
    assert signs.standing("target", is_engine=True) == "alive"
    assert signs.standing("target", is_engine=False) == "alive"
    assert signs.standing("drafter", is_engine=True) == "gone"
    (told,) = signs.engines()
    assert (told["name"], told["status"], told["leases_open"]) == ("target/e1", "ok", 3)
    assert {"tokens_waiting", "host_tokens", "disk_tokens_read"} <= told.keys()

    engine.is_stopped = True
    clock.now += 10.1
    for _ in range(3):
        signs.ask()
    assert engine.num_asked == 2  # it owes an answer
    assert signs.standing("target", is_engine=True) == "silent"
    assert signs.standing("target", is_engine=False) == "alive"
    assert signs.engines() == [{"name": "target/e1", "pool": "target", "status": "unavailable"}]

    engine.pending.set_result(engine.answer)  # it goes on
    signs.ask()
    assert signs.standing("target", is_engine=True) == "alive"


def test_the_dead_and_the_gone_are_forgotten() -> None:
    engine = Part(status())
    known: dict[PoolProcess, Ask] = {ENGINE: engine, REPLICA: Part(RuntimeError("it died"))}
    signs = Signs(lambda: dict(known), Clock())
    signs.find()
    signs.ask()
    assert signs.standing("target", is_engine=False) == "silent"
    del known[ENGINE]
    signs.find()
    signs.ask()
    assert signs.standing("target", is_engine=True) == "gone"
    assert signs.engines() == []
    engine.is_stopped, known[ENGINE] = True, engine  # what it said before is forgotten as well
    signs.find()
    signs.ask()
    assert signs.standing("target", is_engine=True) == "silent"


def test_orchestrators_say_how_their_drafters_read_passages() -> None:
    told = {"reading": "together", "reason": "the pair is being measured"}
    known: dict[PoolProcess, Ask] = {
        PoolProcess("orchestrator", "a", is_engine=False): Part(told),
        PoolProcess("orchestrator", "b", is_engine=False): Part({}),  # which keeps none
        PoolProcess("orchestrator", "c", is_engine=False): Part(RuntimeError("it died")),
        REPLICA: Part(None),
        ENGINE: Part(status()),
    }
    signs = Signs(lambda: known, Clock())
    assert signs.passages() == []
    signs.ask()
    assert signs.passages() == [{"name": "orchestrator/a", **told}]


def test_a_process_tells_of_the_gate_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passage_reports, "_gates", [])
    assert passage_reports.report_passages() == {}
    gate = PassageGate(is_wanted=True, reason="the pair is being measured")
    passage_reports.keep_gate(gate)
    assert passage_reports.report_passages()["reading"] == "together"
    gate.is_open, gate.reason = True, ".99 of the overlap stays"
    assert passage_reports.report_passages() == {"reading": "apart", "reason": gate.reason}
    passage_reports.keep_gate(PassageGate())  # whose drafter keeps none
    assert passage_reports.report_passages() == {}
