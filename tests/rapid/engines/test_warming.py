"""The first steps of an engine: afterwards every kind of step has a known cost."""

from __future__ import annotations

import pytest

from rapid.engines.warming import warm_up
from tests.rapid.engines.gate import EXPECTED, Gate, opened
from tests.rapid.tiny_models import tiny_engine


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 4096}, {"deterministic": True}], ids=str)
async def test_a_warm_engine_judges_its_first_steps_as_soon_as_later_ones(
    settings: dict[str, object],
) -> None:
    engine = tiny_engine(**settings)
    warm_up(engine, engine._config)
    limits: list[float] = []
    gate = Gate(engine)
    gate.open()
    gate.before = lambda: limits.append(engine._compute.limit_s)
    await opened(engine, "a")
    assert (await engine.decode("a", 0, 6)).token_ids == tuple(EXPECTED)
    assert limits
    assert max(limits) < 60.0
    assert engine.status().prefill_tokens_per_s > 0
    engine.close()


def test_a_warm_engine_holds_nothing() -> None:
    engine = tiny_engine(max_leases=1, max_context=64, kv_cache_tokens=64)
    warm_up(engine, engine._config)
    assert (engine.status().leases_open, engine.status().kv_pages_in_use) == (0, 0)
    engine.check_integrity()
    engine.close()
