"""What becomes of leases and callers when a forward or the engine's bookkeeping raises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from rapid.engines.engine import Engine
from rapid.errors import EngineFailed, LeaseNotFound
from rapid.messages import as_prompt
from tests.rapid.engines.gate import EXPECTED, PROMPT, Gate, opened
from tests.rapid.tiny_models import engine_config, lease_request, loaded, tiny_engine


@pytest.fixture
def engine_settings() -> dict[str, object]:
    return {"step_tokens": 16}


def failing(cause: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise cause

    return fail


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
    with pytest.raises(EngineFailed, match=r"failed at a step; its log says why\.$"):
        await engine.decode("a", 0, 2)
    assert "its leases end: a" in caplog.text
    assert "no memory" in caplog.text
    with pytest.raises(LeaseNotFound):
        await engine.decode("a", 0, 2)
    assert engine.status().leases_open == 1
    engine.check_integrity()
    assert (await engine.decode("b", 0, 6)).token_ids == tuple(EXPECTED)


async def test_a_malformed_call_ends_its_lease_alone(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await opened(engine, "b")
    for number in range(6):  # none of these is a failed step
        await opened(engine, f"a{number}", prompt=as_prompt([5]))
        with pytest.raises(EngineFailed, match="its log says why"):
            await engine.verify(f"a{number}", 0, "no block")  # type: ignore[arg-type]
    assert "AttributeError" in caplog.text
    assert (await engine.decode("b", 0, 6)).token_ids == tuple(EXPECTED)


async def test_a_rule_that_raises_ends_its_lease_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await opened(engine, "a")
    await opened(engine, "b")

    def explode(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("rapid.engines.execution.compute.answer_questions", explode)
    with pytest.raises(EngineFailed, match="its log says why") as failed:
        await engine.decode("a", 0, 2)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    assert (await engine.decode("b", 0, 6)).token_ids == tuple(EXPECTED)


async def test_an_engine_whose_device_failed_closes_at_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    await opened(engine, "a")
    await opened(engine, "b")
    gate = Gate(engine)
    gate.before = failing(torch.AcceleratorError("CUDA error: an illegal memory access"))
    closed = asyncio.ensure_future(engine.until_closed())
    calls = [asyncio.ensure_future(engine.decode("a", 0, 2))]
    await gate.forward_started()
    calls.append(asyncio.ensure_future(engine.decode("b", 0, 2)))
    await asyncio.sleep(0)
    assert not closed.done()
    gate.open()
    async with asyncio.timeout(10):
        for call in calls:
            with pytest.raises(EngineFailed) as failed:
                await call
            assert "CUDA" not in str(failed.value)
        await closed
        await engine.until_closed()
    assert "illegal memory access" in caplog.text
    for refused in (engine.open(lease_request("c", PROMPT)), engine.decode("b", 0, 2)):
        with pytest.raises(EngineFailed, match="closed"):
            await refused


@pytest.mark.parametrize("cause", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("odd")])
async def test_five_failed_steps_in_a_row_close_the_engine_and_a_good_one_starts_anew(
    engine: Engine, cause: Exception
) -> None:
    gate = Gate(engine)
    gate.open()

    async def fail(num_times: int) -> None:
        for number in range(num_times):
            await engine.open(lease_request(f"{number}", as_prompt([5, 6])))
            with pytest.raises(EngineFailed):
                await engine.prefill(f"{number}")

    gate.before = failing(cause)
    await fail(4)
    gate.before = lambda: None
    await opened(engine, "a")
    gate.before = failing(cause)
    await fail(4)
    engine.check_running()
    with pytest.raises(EngineFailed):
        await engine.decode("a", 0, 1)
    async with asyncio.timeout(10):
        await engine.until_closed()
    with pytest.raises(EngineFailed, match="closed"):
        engine.check_running()


async def test_logits_that_are_never_numbers_close_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward does not fail, but nothing comes of it."""
    monkeypatch.setattr(
        "rapid.engines.execution.compute.answer_questions",
        lambda asked: [EngineFailed("NaN") for _ in asked],
    )
    for number in range(5):
        await opened(engine, f"{number}", prompt=as_prompt([5]))
        with pytest.raises(EngineFailed):
            await engine.decode(f"{number}", 0, 1)
    async with asyncio.timeout(10):
        await engine.until_closed()


async def test_an_engine_closes_when_a_step_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rapid.engines.execution.watchdog._TICK_S", 0.05)
    monkeypatch.setattr("rapid.engines.execution.compute._LEAST_LIMIT_S", 2.0)
    engine = tiny_engine(max_leases=1)
    await opened(engine, "a")
    await engine.decode("a", 0, 5)  # now it is known what a step costs
    gate = Gate(engine)
    decode = asyncio.ensure_future(engine.decode("a", 0, 1))
    waiting = asyncio.ensure_future(engine.open(lease_request("b", PROMPT)))
    async with asyncio.timeout(60):
        for call in (decode, waiting):
            with pytest.raises(EngineFailed, match="closed"):
                await call
        await engine.until_closed()
    assert "a step does not end" in caplog.text
    await asyncio.to_thread(engine.close)  # does not wait for it
    gate.open()


async def test_where_nobody_would_replace_the_engine_a_long_step_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rapid.engines.execution.watchdog._TICK_S", 0.05)
    monkeypatch.setattr("rapid.engines.execution.compute._LEAST_LIMIT_S", 0.1)
    monkeypatch.setattr("rapid.engines.execution.compute._UNKNOWN_LIMIT_S", 0.1)
    engine = Engine(loaded(), engine_config(), is_watched=False)
    await opened(engine, "a")
    gate = Gate(engine)
    decode = asyncio.ensure_future(engine.decode("a", 0, 1))
    await gate.forward_started()
    await asyncio.sleep(0.5)  # many ticks
    gate.open()
    assert len((await decode).token_ids) == 1
    engine.check_running()
    await asyncio.to_thread(engine.close)


async def test_a_step_may_take_ten_times_what_it_should_and_long_while_that_is_unknown() -> None:
    engine = tiny_engine()
    limits: list[float] = []
    gate = Gate(engine)
    gate.open()
    gate.before = lambda: limits.append(engine._compute.limit_s)
    await opened(engine, "a")
    await engine.decode("a", 0, 5)  # the first three find cold caches and do not count
    engine._state.scheduler.estimate_s = lambda _: 20.0  # type: ignore[method-assign]
    await engine.decode("a", 0, 1)
    assert limits == [600.0] * 5 + [10.0, 200.0]
    engine.close()


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
