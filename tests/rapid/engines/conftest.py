"""The engine of most tests: a tiny one that must end without a page or a lease left over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rapid.engines.engine import Engine
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
