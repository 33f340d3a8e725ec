"""The simulated fleet answers everybody, keeps its books and shows what routing by room gives."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.fleet import fleet

ROOT = Path(__file__).parents[3]


def test_a_hot_document_is_read_by_as_few_replicas_as_its_load_needs() -> None:
    requests = fleet.trace(40.0, 3.0, 40, seed=0)
    ours = fleet.simulate(fleet.OURS, requests, 8, 4, start=1.0)
    serve = fleet.simulate(fleet.SERVE, requests, 8, 4, start=1.0)
    assert ours.refused == 0
    assert ours.waste <= 1.2
    assert serve.waste > 1.5
    assert ours.in_time >= serve.in_time


@pytest.mark.parametrize("start", [1.0, 0.5])
def test_the_books_balance_when_all_is_answered(start: float) -> None:
    requests = fleet.trace(30.0, 4.0, 40, seed=1)
    one = fleet.Fleet(fleet.OURS, 6, 3, start=start, seed=1)
    one.run(requests)
    assert len(one.first_tokens) + one.refused == len(requests)
    assert min(one.first_tokens) > 0
    one.drain()
    for pool in (one.target, one.drafter):
        assert pool.queued == 0
        assert 1 <= pool.target <= pool.most
        for engine in pool.all:
            assert engine.num_requests == engine.pages_in_use == engine.kv_tokens == 0


def test_the_same_trace_and_seed_give_the_same_outcome() -> None:
    requests = fleet.trace(10.0, 3.0, 12, seed=2)
    assert requests == fleet.trace(10.0, 3.0, 12, seed=2)
    outcomes = [fleet.simulate(fleet.OURS, requests, 4, 2, start=0.5) for _ in range(2)]
    assert outcomes[0] == outcomes[1]


class World:
    """One engine with its calendar, and the tokens that it had to read."""

    def __init__(self) -> None:
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = itertools.count()
        self.tokens: list[int] = []
        self.read: dict[int, float] = {}
        self.engine = fleet.Engine(self, fleet.TARGET, "one")

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), what))

    def prefilled(self, engine: Any, need: Any, num_tokens: int) -> None:
        self.tokens.append(num_tokens)

    def ask(self, document: str, num_tokens: int, now: float = 0.0) -> Any:
        request = fleet.Request(next(self.numbers), now, document, num_tokens, 100)

        def read(then: float) -> None:
            self.read[request.number] = then

        lease = fleet.Lease(request, request.need, lambda now: None, read)
        self.engine.submit(lease, now)
        return lease

    def run(self) -> None:
        while self.events:
            when, _, what = heapq.heappop(self.events)
            what(when)


def test_questions_on_a_document_that_is_being_read_wait_for_it_and_read_their_own() -> None:
    world = World()
    first, second = world.ask("a", 40_000), world.ask("a", 40_000)
    world.run()
    assert world.tokens == [40_064, 64]
    alone, question = (fleet.TARGET.prefill_s(*each) for each in ((0, 40_064), (40_000, 40_064)))
    assert world.read[first.request.number] == pytest.approx(alone)
    assert world.read[second.request.number] == pytest.approx(alone + question)


def test_prompts_that_are_read_side_by_side_share_the_time() -> None:
    world = World()
    long, short = world.ask("a", 40_000), world.ask("b", 10_000)
    world.run()
    alone = fleet.TARGET.prefill_s(0, 10_064)
    assert world.read[short.request.number] == pytest.approx(2 * alone)
    both = alone + fleet.TARGET.prefill_s(0, 40_064)
    assert world.read[long.request.number] == pytest.approx(both)


def test_the_end_of_the_document_asked_for_longest_ago_is_evicted() -> None:
    world = World()
    half = fleet.TARGET.pages * fleet.PAGE // 32 * 16
    for document in ("a", "b"):
        lease = world.ask(document, half - 320)
        world.run()
        lease.release(world.read[lease.request.number])
    assert dict(world.engine.held) == {"a": half - 320, "b": half - 320}
    world.ask("c", half - 320, now=100.0)
    tail = -(-(fleet.QUESTION + 100) // fleet.PAGE)
    left = fleet.TARGET.pages * fleet.PAGE - 2 * (half - 320) - tail * fleet.PAGE
    assert dict(world.engine.held) == {"a": left, "b": half - 320, "c": half - 320}


def test_a_report_reaches_the_routers_late_and_a_replica_that_starts_has_none() -> None:
    one = fleet.Fleet(fleet.OURS, 2, 1, start=0.5, seed=1)
    pool = one.target
    pool._scale(2, 0.0)
    while one.events and one.events[0][0] <= 60.0:
        one.now, _, what = heapq.heappop(one.events)
        what(one.now)
    pool.tick(60.0)
    old, new = pool._candidates(0, 60.0)
    assert 0.5 <= 60.0 - old.report.at <= 1.5
    assert new.report is None
    assert pool.gpu_s == 2
    pool._scale(1, 60.0)  # the newest goes, and holds its GPU until it is empty
    assert [each.name for each in pool.draining] == [new.replica]
    pool.tick(61.0)
    assert (pool.gpu_s, pool.draining) == (3, [])


def test_the_simulated_pools_are_those_of_the_shipped_configuration() -> None:
    shipped = ROOT / "cluster" / "configs" / "llama-3.1-8b-with-70b-drafter.yaml"
    args = yaml.safe_load(shipped.read_text())["applications"][0]["args"]
    for kind, model in (("target", fleet.TARGET), ("drafter", fleet.DRAFTER)):
        pool = args[kind]["pool"]
        assert pool["target_ongoing_requests"] == model.target_ongoing
        assert (pool["upscale_delay_s"], pool["downscale_delay_s"]) == (model.up_s, model.down_s)
        assert args[kind]["engine"]["max_leases"] == model.max_leases
        assert pool["num_gpus"] == model.gpus
