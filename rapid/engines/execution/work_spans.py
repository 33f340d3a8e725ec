"""Spans of the calls on an engine: how long each waited, and how long it was at work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rapid.engines.work.base import Times, Work
from rapid.tracing import span_below


@contextmanager
def trace_work(work: Work, times: Times) -> Iterator[None]:
    """Record the context, in which the call's reply is awaited, as a span ``engine.<call>``.

    It has the lease's role, the number of forwards with rows of the call, and milliseconds that add
    up to the duration: in these forwards, behind copies of pages, and for its turn (``waited``).
    """
    request = work.lease.request
    role = request.lease_id.rpartition("/")[2].partition("-")[0]
    name = f"engine.{type(work).__name__.lower()}"
    with span_below(request.traceparent, name, role=role) as recorded:
        try:
            yield
        finally:
            worked_s = times.computed_s + times.copied_s
            waited_s = max(time.perf_counter() - times.since - worked_s, 0.0)
            recorded.set_attributes(
                {
                    "rapid.steps": times.num_steps,
                    "rapid.waited_ms": round(1e3 * waited_s, 3),
                    "rapid.computed_ms": round(1e3 * times.computed_s, 3),
                    "rapid.copied_ms": round(1e3 * times.copied_s, 3),
                }
            )
