"""The breakable engine, with a real model and without Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.errors import EngineFailed
from rapid.messages import LeaseRequest, Terms, as_prompt
from tests.faults.engines import STICKY, WEDGED, left_alone_s, load_breakable

CONFIG = EngineConfig(
    model="embedded:drafter", max_context=128, kv_cache_tokens=256, max_leases=2, threads=1
)
REQUEST = LeaseRequest(
    "a", Terms("local", SamplingConfig(), SpeculationConfig(), 8), as_prompt(range(30, 50))
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    made = load_breakable(CONFIG, str(tmp_path))
    yield made
    made.close()


async def test_an_engine_that_was_told_to_break_raises_what_a_gpu_raises(
    engine: Any, tmp_path: Path
) -> None:
    await engine.open(REQUEST)
    order = tmp_path / str(os.getpid())
    order.write_text(STICKY)
    assert left_alone_s(order) is None
    with pytest.raises(EngineFailed):
        await engine.prefill("a")
    assert left_alone_s(order) == 0.0
    opening = engine.open(replace(REQUEST, lease_id="b"))
    await asyncio.gather(opening, return_exceptions=True)  # it may have closed by now
    assert (left_alone_s(order) or 0.0) > 0.0


async def test_a_wedged_engine_goes_on_when_it_is_mended(engine: Any, tmp_path: Path) -> None:
    order = tmp_path / str(os.getpid())
    order.write_text(WEDGED)
    await engine.open(REQUEST)
    reading = asyncio.ensure_future(engine.prefill("a"))
    done, _ = await asyncio.wait({reading}, timeout=0.3)
    assert not done
    order.unlink()
    assert (await reading).num_tokens == 20
