"""The spans of a request's rounds."""

from __future__ import annotations

from typing import Generic, TypeVar

from opentelemetry.trace import Span

from rapid.messages import Verdict
from rapid.ports import Verifier
from rapid.tracing import span

Block = TypeVar("Block")


class TracedVerifier(Generic[Block]):
    """A verifier whose every round, with the drafting that it waits for, is a span."""

    def __init__(self, verifier: Verifier[Block], choice: int) -> None:
        self._verifier = verifier
        self._choice = choice

    async def verify(self, block: Block) -> Verdict:
        """Judge a block; see `rapid.ports.Verifier`."""
        with span("round", choice=self._choice) as recorded:
            return _note(recorded, await self._verifier.verify(block))

    async def decode(self, num_tokens: int) -> Verdict:
        """Decode with the verifier alone; see `rapid.ports.Verifier`."""
        with span("round", choice=self._choice) as recorded:
            return _note(recorded, await self._verifier.decode(num_tokens))


def _note(recorded: Span, verdict: Verdict) -> Verdict:
    recorded.set_attributes(
        {
            "rapid.position": verdict.position,
            "rapid.drafted_tokens": verdict.num_drafted,
            "rapid.accepted_tokens": verdict.num_accepted,
            "rapid.committed_tokens": len(verdict.token_ids),
        }
    )
    return verdict
