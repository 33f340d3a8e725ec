"""What an engine records of the calls of a traced request, and that it records nothing else."""

from __future__ import annotations

import asyncio
import time
from threading import Event
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rapid.engines.engine import Engine
from rapid.errors import EngineFailed
from rapid.tracing import current_traceparent
from tests.rapid.engines.gate import Gate, opened
from tests.rapid.tiny_models import lease_request, random_prompt, tiny_engine
from tests.spans import collector, named


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return collector()


@pytest.fixture
def engine_settings() -> dict[str, object]:
    return {"step_tokens": 16}


def place() -> str:
    """The place of a caller's span in its trace."""
    with trace.get_tracer("caller").start_as_current_span("caller"):
        return current_traceparent()


def attributes(recorded: ReadableSpan) -> dict[str, Any]:
    return dict(recorded.attributes or {})


async def test_every_call_of_a_traced_request_is_a_span_below_its_callers(
    engine: Engine, spans: InMemorySpanExporter
) -> None:
    traceparent = place()
    await opened(engine, "r/target-1", traceparent=traceparent)
    await engine.decode("r/target-1", 0, 6)
    engine.release("r/target-1")
    recorded = spans.get_finished_spans()
    assert [each.name for each in recorded] == ["caller", "engine.prefill", "engine.decode"]
    caller, *calls = recorded
    for each in calls:
        assert each.context.trace_id == caller.context.trace_id
        assert each.parent is not None
        assert each.parent.span_id == caller.context.span_id
        assert attributes(each)["rapid.role"] == "target"
        assert attributes(each)["rapid.computed_ms"] > 0
        assert attributes(each)["rapid.copied_ms"] == 0
        assert attributes(each)["rapid.waited_ms"] >= 0
    assert [attributes(each)["rapid.steps"] for each in calls] == [3, 6]  # 39 tokens by 16; 6 by 1


async def test_a_request_that_is_not_traced_is_not_recorded(
    engine: Engine, spans: InMemorySpanExporter
) -> None:
    with trace.get_tracer("caller").start_as_current_span("caller"):
        await opened(engine, "r/target-1")
        await engine.decode("r/target-1", 0, 2)
    engine.release("r/target-1")
    assert [each.name for each in spans.get_finished_spans()] == ["caller"]


async def test_what_a_call_waits_for_another_is_not_its_computing(
    engine: Engine, spans: InMemorySpanExporter
) -> None:
    """The first forward of two leases is held up; the second lease's call comes only then."""
    await opened(engine, "a")
    await opened(engine, "r/target-1", traceparent=place())
    spans.clear()
    gate = Gate(engine)
    other = asyncio.ensure_future(engine.decode("a", 0, 1))
    await gate.forward_started()
    call = asyncio.ensure_future(engine.decode("r/target-1", 0, 1))
    await asyncio.sleep(0)  # the call is in, and waits for a forward that is not its own
    began = time.perf_counter()
    await asyncio.sleep(0.01)
    held_up_ms = 1e3 * (time.perf_counter() - began)
    gate.open()
    await asyncio.gather(other, call)
    for lease_id in ("a", "r/target-1"):
        engine.release(lease_id)
    (recorded,) = spans.get_finished_spans()
    assert attributes(recorded)["rapid.steps"] == 1
    assert attributes(recorded)["rapid.waited_ms"] >= int(held_up_ms)


async def test_copies_from_host_memory_that_hold_a_call_up_are_told(
    spans: InMemorySpanExporter,
) -> None:
    engine = tiny_engine(kv_cache_tokens=128, max_context=128, host_cache_tokens=256)
    first, second = (random_prompt(97, seed=seed) for seed in (1, 2))
    await opened(engine, "first", prompt=first, max_tokens=4)
    engine.release("first")
    assert engine._compute.host is not None
    make, has_called = engine._compute.host.launch, Event()

    def when_called(*given: Any) -> None:
        has_called.wait()
        make(*given)

    engine._compute.host.launch = when_called  # type: ignore[method-assign]
    await engine.open(lease_request("second", second, max_tokens=4, traceparent=place()))
    call = asyncio.ensure_future(engine.prefill("second"))
    await asyncio.sleep(0)  # the call is in; the copies that opening ordered are still to be made
    has_called.set()
    await call
    (recorded,) = named(spans.get_finished_spans(), "engine.prefill")
    assert attributes(recorded)["rapid.copied_ms"] > 0
    engine.close()


async def test_a_call_that_fails_leaves_the_class_of_its_error(
    engine: Engine, spans: InMemorySpanExporter
) -> None:
    await opened(engine, "r/target-1", traceparent=place())
    gate = Gate(engine)
    gate.open()

    def explode() -> None:
        raise RuntimeError("no memory")

    gate.before = explode
    with pytest.raises(EngineFailed):
        await engine.decode("r/target-1", 0, 2)
    (failed,) = named(spans.get_finished_spans(), "engine.decode")
    assert attributes(failed)["error.type"] == "EngineFailed"
    assert "no memory" not in failed.to_json()
