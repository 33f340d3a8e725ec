"""Spans: below one that is recorded, without what a caller or an error has said."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from rapid.tracing import current_traceparent, span, span_below
from tests.spans import collector, named

SECRET = "lighthouse"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return collector()


def attributes(recorded: ReadableSpan) -> dict[str, object]:
    return dict(recorded.attributes or {})


def test_a_place_in_a_trace_can_be_carried_elsewhere(spans: InMemorySpanExporter) -> None:
    assert current_traceparent() == ""
    with trace.get_tracer("caller").start_as_current_span("caller") as caller:
        place = current_traceparent()
    with span_below(place, "engine.prefill", role="target"), span("inner"):
        pass
    (below,) = named(spans.get_finished_spans(), "engine.prefill")
    (inner,) = named(spans.get_finished_spans(), "inner")
    assert below.context.trace_id == inner.context.trace_id == caller.get_span_context().trace_id
    assert below.parent is not None
    assert below.parent.span_id == caller.get_span_context().span_id
    assert attributes(below) == {"rapid.role": "target"}


def test_an_error_leaves_its_class_and_not_its_message(spans: InMemorySpanExporter) -> None:
    with (
        trace.get_tracer("caller").start_as_current_span("caller"),
        pytest.raises(ValueError, match=SECRET),
        span("retrieval"),
    ):
        raise ValueError(SECRET)
    (failed,) = named(spans.get_finished_spans(), "retrieval")
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes(failed) == {"error.type": "ValueError"}
    assert SECRET not in failed.to_json()
