"""The engine of most tests: a tiny one that must end without a page or a lease left over."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rapid.engines.engine import Engine
from tests.rapid.tiny_models import tiny_engine


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = tiny_engine(step_tokens=16)
    yield engine
    engine.check_integrity()
    engine.close()
    assert engine.status().kv_pages_in_use == 0
    engine.check_integrity()
