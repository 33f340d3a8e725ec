"""The simulated fleet answers everybody, keeps its books and shows what routing by room gives."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fleet.py"


@pytest.fixture(scope="module", name="fleet")
def _fleet() -> Iterator[ModuleType]:
    """The script, imported."""
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("fleet_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))


def test_a_hot_document_is_read_by_as_few_replicas_as_its_load_needs(fleet: ModuleType) -> None:
    requests = fleet.trace(40.0, 3.0, 12, seed=0)
    ours = fleet.simulate(fleet.OURS, requests, 8, 4, start=1.0)
    serve = fleet.simulate(fleet.SERVE, requests, 8, 4, start=1.0)
    assert ours.refused == 0
    assert ours.waste <= 1.2
    assert serve.waste > 1.5
    assert ours.in_time >= serve.in_time


@pytest.mark.parametrize("start", [1.0, 0.5])
def test_the_books_balance_when_all_is_answered(fleet: ModuleType, start: float) -> None:
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


def test_the_same_trace_and_seed_give_the_same_outcome(fleet: ModuleType) -> None:
    requests = fleet.trace(10.0, 3.0, 12, seed=2)
    assert requests == fleet.trace(10.0, 3.0, 12, seed=2)
    outcomes = [fleet.simulate(fleet.OURS, requests, 4, 2, start=0.5) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
