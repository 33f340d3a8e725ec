"""Spans of OpenTelemetry around what a request waits for.

A span is made below one that is recorded already, and never starts a trace: a server's framework
does that (`docs/operations.md`), in process the caller. Without one a span costs the look at the
current context. Attributes are roles and numbers; no text, tenant, key or error message is one.
Each lease carries its place in the trace with it, as its engine may run in another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PLACE = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("rapid")


@contextmanager
def span(name: str, **attributes: str | int) -> Iterator[Span]:
    """Record the context as a span with these attributes, each named ``rapid.<name>``.

    The span is current in the context, so that what is called there is recorded below it. An error
    leaves its class in ``error.type``. Do not yield to a consumer inside the context.
    """
    if not trace.get_current_span().is_recording():
        yield trace.INVALID_SPAN
        return
    with _record(name, None, attributes) as recorded:
        yield recorded


@contextmanager
def span_below(traceparent: str, name: str, **attributes: str | int) -> Iterator[Span]:
    """Record the context as a span like `span`, but below the one that `traceparent` names."""
    with _record(name, _PLACE.extract({"traceparent": traceparent}), attributes) as recorded:
        yield recorded


def current_traceparent() -> str:
    """Return the W3C ``traceparent`` of the current span; empty if none is recorded."""
    if not trace.get_current_span().is_recording():
        return ""
    carrier: dict[str, str] = {}
    _PLACE.inject(carrier)
    return carrier["traceparent"]


@contextmanager
def _record(
    name: str, context: Context | None, attributes: Mapping[str, str | int]
) -> Iterator[Span]:
    with _tracer.start_as_current_span(
        name,
        context,
        attributes={f"rapid.{key}": value for key, value in attributes.items()},
        record_exception=False,
        set_status_on_exception=False,
    ) as recorded:
        try:
            yield recorded
        except Exception as error:
            recorded.set_attribute("error.type", type(error).__name__)
            recorded.set_status(Status(StatusCode.ERROR))
            raise
