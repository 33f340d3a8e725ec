"""The engine of most tests: a tiny one that must end without a page or a lease left over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rapid.engines.engine import Engine
from rapid.engines.kv.tiers.host_tier import RestorePace
from tests.rapid.engines.gate import Gate
from tests.rapid.tiny_models import tiny_engine


@pytest.fixture
def engine_settings() -> dict[str, Any]:
    """Settings of `engine`; a module or a test may have others."""
    return {}


@pytest.fixture
async def engine(engine_settings: dict[str, Any]) -> AsyncIterator[Engine]:
    engine = tiny_engine(**engine_settings)
    yield engine
    if isinstance(gate := engine._compute.runner.run, Gate):
        gate.open()
    engine.check_integrity()
    engine.close()
    assert engine.status().kv_pages_in_use == 0
    engine.check_integrity()


@pytest.fixture
def always_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are copied and read back, however long that took.

    Computing a page of so small a model takes about as long, so the measured pace is chance.
    """
    monkeypatch.setattr(RestorePace, "is_restoring_faster", True)
