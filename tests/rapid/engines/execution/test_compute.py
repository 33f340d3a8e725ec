"""What becomes of leases and callers when a forward or the engine's bookkeeping raises."""

from __future__ import annotations

import asyncio

import pytest

from rapid.engines.engine import Engine
from rapid.errors import EngineFailed, LeaseNotFound
from tests.rapid.engines.gate import EXPECTED, PROMPT, Gate, opened
from tests.rapid.tiny_models import lease_request, tiny_engine


@pytest.fixture
def engine_settings() -> dict[str, object]:
    return {"step_tokens": 16}


async def test_a_forward_that_raises_ends_its_leases_and_nothing_else(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await opened(engine, "a")
    await opened(engine, "b")
    gate = Gate(engine)
    gate.open()

    def explode() -> None:
        gate.before = lambda: None
        raise RuntimeError("no memory")

    gate.before = explode
    with pytest.raises(EngineFailed, match="no memory"):
        await engine.decode("a", 0, 2)
    assert caplog.messages == ["forward pass failed: leases a"]
    with pytest.raises(LeaseNotFound):
        await engine.decode("a", 0, 2)
    assert engine.status().leases_open == 1
    engine.check_integrity()
    assert (await engine.decode("b", 0, 6)).token_ids == tuple(EXPECTED)


async def test_a_malformed_call_ends_its_lease_alone(engine: Engine) -> None:
    await opened(engine, "a")
    await opened(engine, "b")
    with pytest.raises(EngineFailed, match="AttributeError"):
        await engine.verify("a", 0, "no block")  # type: ignore[arg-type]
    assert (await engine.decode("b", 0, 6)).token_ids == tuple(EXPECTED)


async def test_a_rule_that_raises_ends_its_lease_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await opened(engine, "a")
    await opened(engine, "b")

    def explode(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("rapid.engines.work.drafting.decode_token", explode)
    with pytest.raises(EngineFailed, match="ZeroDivisionError"):
        await engine.decode("a", 0, 2)
    monkeypatch.undo()
    assert (await engine.decode("b", 0, 6)).token_ids == tuple(EXPECTED)


async def test_nobody_is_left_waiting_when_ending_leases_raises_as_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(max_leases=2)
    await opened(engine, "a")
    await opened(engine, "b", num_choices=2)
    gate = Gate(engine)
    waiting = asyncio.ensure_future(engine.open(lease_request("c", PROMPT)))
    endings = [asyncio.ensure_future(engine.wait_closed(lease_id)) for lease_id in "ab"]
    calls = [asyncio.ensure_future(engine.decode("a", 0, 2))]
    await gate.forward_started()
    calls += [asyncio.ensure_future(engine.decode("b", choice, 2)) for choice in range(2)]
    await asyncio.sleep(0)
    engine.check_running()

    def explode(*_: object) -> None:
        raise RuntimeError("no memory")

    gate.before = explode
    # while the leases are ended for it
    monkeypatch.setattr(engine._state.scheduler, "drop", explode)
    gate.open()
    async with asyncio.timeout(10):
        for call in (*calls, waiting):
            with pytest.raises(EngineFailed):
                await call
        assert await asyncio.gather(*endings) == ["failed", "failed"]
    assert "bookkeeping failed" in caplog.text
    for refused in (engine.open(lease_request("d")), engine.wait_closed("a")):
        with pytest.raises(EngineFailed, match="closed"):
            await refused
    with pytest.raises(EngineFailed, match="closed"):  # what the health check asks
        engine.check_running()
    monkeypatch.undo()
    engine.close()
