"""Spans of OpenTelemetry around what a request waits for.

A span is made below one that is recorded already, and never starts a trace: a server's framework
does that (`docs/operations.md`), in process the caller. Without one a span costs the look at the
current context. Attributes are roles and numbers; no text, tenant, key or error message is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from rapid.messages import Verdict
from rapid.ports import Verifier

Block = TypeVar("Block")
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
    with _tracer.start_as_current_span(
        name,
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


class TracedVerifier(Generic[Block]):
    """A verifier whose every round, with the drafting that it waits for, is a span."""

    def __init__(self, verifier: Verifier[Block], choice: int) -> None:
        self._verifier = verifier
        self._choice = choice

    async def verify(self, block: Block) -> Verdict:
        """Judge a block; see `rapid.ports.Verifier`."""
        with span("round", choice=self._choice) as recorded:
            return _noted(recorded, await self._verifier.verify(block))

    async def decode(self, num_tokens: int) -> Verdict:
        """Decode with the verifier alone; see `rapid.ports.Verifier`."""
        with span("round", choice=self._choice) as recorded:
            return _noted(recorded, await self._verifier.decode(num_tokens))


def _noted(recorded: Span, verdict: Verdict) -> Verdict:
    recorded.set_attributes(
        {
            "rapid.position": verdict.position,
            "rapid.drafted_tokens": verdict.num_drafted,
            "rapid.accepted_tokens": verdict.num_accepted,
            "rapid.committed_tokens": len(verdict.token_ids),
        }
    )
    return verdict
