"""What a request records where its caller traces it, and that it records nothing otherwise."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rapid.chat_messages import Document
from rapid.errors import TargetUnavailable
from rapid.events import Finished, GenerationEvent
from tests.local_pools import LocalApplication
from tests.ray_cluster import question
from tests.spans import collector, named

SECRET = "lighthouse"
ATLAS = (Document("atlas", f"The {SECRET} of Varo guards the northern strait.\n\n" * 8),)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return collector()


def attributes(recorded: ReadableSpan) -> dict[str, object]:
    return dict(recorded.attributes or {})


async def traced(app: LocalApplication, *, target_dies_after: int | None = None, **asked: object):
    """The events of a request below a span of the caller's, and that span's context."""
    request = question("r", seed=5, max_tokens=24, documents=ATLAS, **asked)  # type: ignore[arg-type]
    with trace.get_tracer("caller").start_as_current_span("caller") as caller:
        events = await app.answered(request, target_dies_after=target_dies_after)
    return events, caller.get_span_context()


async def test_everything_that_a_request_waits_for_is_below_its_callers_span(
    spans: InMemorySpanExporter,
) -> None:
    events, caller = await traced(LocalApplication(), mode="fused")
    recorded = [each for each in spans.get_finished_spans() if each.name != "caller"]
    assert {each.name for each in recorded} == {
        "tokenize", "retrieval", "lease", "prefill", "round"
    }  # fmt: skip
    for each in recorded:
        assert each.context.trace_id == caller.trace_id
        assert each.parent is not None
        assert each.parent.span_id == caller.span_id
    roles = {"target", "drafter"} | ({"witness"} & leased(recorded))
    assert leased(recorded) == roles
    assert {attributes(each)["rapid.role"] for each in named(tuple(recorded), "prefill")} == roles
    (found,) = named(tuple(recorded), "retrieval")
    assert attributes(found) == {"rapid.chunks": 1}
    rounds = [attributes(each) for each in named(tuple(recorded), "round")]
    (choice,) = receipt_of(events).choices
    assert len(rounds) == choice.rounds
    assert sum(each["rapid.accepted_tokens"] for each in rounds) == choice.accepted  # type: ignore[misc]
    assert sum(each["rapid.committed_tokens"] for each in rounds) == 24  # type: ignore[misc]


def leased(recorded: list[ReadableSpan]) -> set[object]:
    leases = named(tuple(recorded), "lease")
    return {attributes(each)["rapid.role"] for each in leases}


def receipt_of(events: list[GenerationEvent]):  # type: ignore[no-untyped-def]
    assert isinstance(events[-1], Finished)
    return events[-1].receipt


async def test_attributes_are_roles_and_numbers(spans: InMemorySpanExporter) -> None:
    await traced(LocalApplication(), mode="fused")
    for each in spans.get_finished_spans():
        assert not each.events
        for key, value in attributes(each).items():
            assert key == "rapid.role" or isinstance(value, int), (each.name, key)
        assert SECRET not in each.to_json()


async def test_new_leases_are_below_the_failover(spans: InMemorySpanExporter) -> None:
    await traced(LocalApplication(), mode="plain", target_dies_after=2)
    recorded = spans.get_finished_spans()
    (failover,) = named(recorded, "failover")
    parents = [each.parent.span_id for each in named(recorded, "lease") if each.parent]
    assert len(parents) == 2
    assert parents[1] == failover.context.span_id
    (lost,) = [each for each in named(recorded, "round") if not each.status.is_ok]
    assert lost.status.description is None
    assert attributes(lost)["error.type"] == TargetUnavailable.__name__


async def test_without_a_trace_nothing_is_recorded(spans: InMemorySpanExporter) -> None:
    await LocalApplication().answered(question("r", mode="fused", documents=ATLAS))
    assert not spans.get_finished_spans()
