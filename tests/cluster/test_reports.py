"""What a replica reports of its engine, and when it has nothing to say."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import pytest

from cluster.reports import EngineReport, EngineWatch, document_name, list_held_documents
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.engine_status import EngineStatus
from rapid.messages import LeaseRequest, Terms, as_prompt

STATUS = EngineStatus(
    leases_open=3,
    max_leases=8,
    kv_pages_in_use=100,
    kv_pages_total=256,
    page_tokens=16,
    max_context=4096,
    leases_kept=1,
    kv_pages_kept=20,
    leases_waiting=2,
    tokens_waiting=5000,
    prefill_tokens_per_s=1000.04,
    step_s=0.01,
)


class Engine:
    """An engine actor that answers with its status, or not at all."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.fails = False
        self.asked = asyncio.Queue[None]()
        self.status = self

    def remote(self) -> Any:
        return self._answer()

    async def _answer(self) -> EngineStatus:
        self.asked.put_nowait(None)
        await self.answers.wait()
        if self.fails:
            raise RuntimeError("a secret")
        return STATUS


class ManualClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def about(affinity: str, num_tokens: int = 100) -> LeaseRequest:
    return LeaseRequest(
        "lease",
        Terms("local", SamplingConfig(), SpeculationConfig(), 50),
        as_prompt(range(num_tokens)),
        affinity=affinity,
    )


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    monkeypatch.setattr("cluster.reports._POLL_S", 0.01)
    monkeypatch.setattr(ManualClock, "now", 100.0)
    return ManualClock()


async def watched(engine: Engine, clock: ManualClock) -> EngineWatch:
    """A watch that has asked the engine once at least."""
    watch = EngineWatch(engine, clock)  # type: ignore[arg-type]
    assert watch.routing_stats() == watch.autoscaling_stats() == {}
    watch.start()
    watch.start()
    await next_look(engine)
    return watch


async def next_look(engine: Engine) -> None:
    """Wait until the engine was asked once more and has answered, as it is asked again."""
    engine.asked = asyncio.Queue[None]()
    async with asyncio.timeout(30):
        await engine.asked.get()
        await engine.asked.get()


async def test_a_report_says_what_a_new_lease_could_have(clock: ManualClock) -> None:
    watch = await watched(Engine(), clock)
    report = EngineReport.from_stats(watch.routing_stats(), clock.now)
    assert report == EngineReport(
        at=100.0,
        pages_free=136,
        pages_total=256,
        page_tokens=16,
        leases_free=4,
        num_requests=0,
        leases_waiting=2,
        tokens_waiting=5000,
        prefill_tokens_per_s=1000.0,
        step_s=0.01,
        in_use=[],
    )
    numbers = watch.autoscaling_stats()
    assert numbers["pages_free"] == 136
    assert all(isinstance(value, int | float) for value in numbers.values())


async def test_requests_and_their_documents_are_counted(clock: ManualClock) -> None:
    engine = Engine()
    watch = await watched(engine, clock)
    with watch.counting(about("one", 900)), watch.counting(about("one", 800)):
        with watch.counting(about("")):
            await next_look(engine)
            assert watch.routing_stats()["num_requests"] == 3
        assert watch.routing_stats()["documents"] == {document_name("one"): 900}
        assert watch.routing_stats()["in_use"] == [document_name("one")]
    await next_look(engine)
    assert watch.routing_stats()["in_use"] == []
    assert watch.routing_stats()["num_requests"] == 0
    assert watch.routing_stats()["documents"] == {document_name("one"): 900}  # it is still cached


async def test_an_engine_that_hangs_or_fails_makes_its_report_stale(clock: ManualClock) -> None:
    engine = Engine()
    watch = await watched(engine, clock)
    engine.answers.clear()
    clock.now += 4
    assert watch.autoscaling_stats()
    clock.now += 2
    assert watch.autoscaling_stats() == {}
    assert EngineReport.from_stats(watch.routing_stats(), clock.now) is None
    engine.fails = True
    engine.answers.set()
    await next_look(engine)
    assert watch.autoscaling_stats() == {}
    engine.fails = False
    await next_look(engine)
    assert watch.autoscaling_stats()


def test_the_documents_used_last_are_held_as_far_as_they_fit() -> None:
    used = OrderedDict(old=300, middle=500, new=400)
    assert list_held_documents(used, 900) == {"new": 400, "middle": 500}
    assert list_held_documents(used, 899) == {"new": 400, "middle": 499}  # its end was evicted
    assert list_held_documents(used, 1200) == {"new": 400, "middle": 500, "old": 300}
    assert list_held_documents(OrderedDict(), 900) == {}
