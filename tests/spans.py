"""A collector of spans in this process, which every test that uses it finds empty."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

_EXPORTER = InMemorySpanExporter()


def collector() -> InMemorySpanExporter:
    """The collector; a process can have one tracer provider, and only once."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(_EXPORTER))
        trace.set_tracer_provider(provider)
    _EXPORTER.clear()
    return _EXPORTER


def named(spans: tuple[ReadableSpan, ...], name: str) -> list[ReadableSpan]:
    """The spans of a name, in the order in which they ended."""
    return [span for span in spans if span.name == name]
