"""The life of a request on its engines, written once: lease, prefill, draft and verify, release.

::

    target lease ── target prefill ──────────────────────────┐
         └────────── drafter lease ── drafter prefill ───────┴── rounds of each choice

Engines are reached through `rapid.ports.EnginePool`, which `rapid.engines.ports` implements for
engines in this process and `deployments.orchestrator.ray_ports` for pools of replicas. What drafts
is a `rapid.answering.sources.DraftSource`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from rapid.errors import DrafterUnavailable
from rapid.messages import Int32Array, LeaseRequest, PrefillReceipt, Verdict
from rapid.ports import Drafter, EngineLease, EnginePool, Pace, Refresh
from rapid.speculation.loop import speculate
from rapid.speculation.refreshing import RefreshTrigger

if TYPE_CHECKING:
    from rapid.config import SamplingConfig, SpeculationConfig

Result = TypeVar("Result")
Role = Literal["target", "drafter"]
Committed = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Terms:
    """What all leases of one request have in common.

    Attributes:
        max_tokens: longest answer, in tokens.
        num_logprobs: None for none, else alternatives beside each committed token.
        affinity: name of what the target reads (`rapid.messages.LeaseRequest`).
        is_streamed: whether somebody reads along while the answer grows.
    """

    request_id: str
    tenant: str
    sampling: SamplingConfig
    speculation: SpeculationConfig
    max_tokens: int
    num_choices: int = 1
    num_logprobs: int | None = None
    affinity: str = ""
    is_streamed: bool = False


@dataclass(frozen=True, slots=True)
class Holding:
    """A lease with its prompt, whose prefill began when the lease was taken."""

    role: Role
    prompt_ids: Int32Array
    lease: EngineLease
    prefill: asyncio.Task[PrefillReceipt]
    _held: AsyncExitStack

    async def release(self) -> None:
        """Give the lease back before the session ends."""
        await self._held.aclose()


class DraftSource(Protocol):
    """What a session needs of a source of drafts; the kinds are in `rapid.answering.sources`."""

    @property
    def lease(self) -> EngineLease | None:
        """The lease of its own that it drafts on now."""
        ...

    def drafter(self, choice: int, committed: Sequence[int] = ()) -> Drafter[Any]:
        """Return what proposes tokens for a choice after its `committed` ones."""
        ...


class Session:
    """The leases of one request; leaving its context gives back whatever is held.

    Attributes:
        timings_ms: milliseconds waited for leases (``queue``) and for each prefill, added up.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.timings_ms = {"queue": 0.0, "target_prefill": 0.0, "drafter_prefill": 0.0}
        self._held = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release_all()

    async def release_all(self) -> None:
        """Give back all leases; others may be taken afterwards."""
        held, self._held = self._held, AsyncExitStack()
        await held.aclose()

    async def take(
        self,
        pool: EnginePool,
        role: Role,
        prompt_ids: Int32Array,
        *,
        timeout_s: float | None = None,
        committed: Committed = (),
        companion_tokens: int = 0,
        beside: Holding | None = None,
    ) -> Holding:
        """Take a lease and begin its prefill.

        Args:
            pool: where to take it.
            role: what the engine does for this request.
            prompt_ids: what it reads.
            timeout_s: longest wait for room, in seconds; None waits without end.
            committed: for each choice, tokens generated on a lease that was lost or given back.
            companion_tokens: about how long the prompt of a second lease on this engine will be.
            beside: the request's first lease on this engine.

        Raises:
            Overloaded: there was no room in time.
            RapidError: the pool cannot be reached or refuses the prompt.
        """
        terms = self.terms
        request = LeaseRequest(
            # Unique beyond the request's id, so that a late call never meets another lease.
            lease_id=f"{terms.request_id}/{role}-{secrets.token_hex(6)}",
            tenant=terms.tenant,
            prompt_ids=prompt_ids,
            max_tokens=terms.max_tokens,
            sampling=terms.sampling,
            speculation=terms.speculation,
            num_choices=terms.num_choices,
            num_logprobs=terms.num_logprobs,
            committed=tuple(tuple(each) for each in committed),
            companion_tokens=companion_tokens,
            beside=beside.lease.lease_id if beside else None,
            affinity=terms.affinity if role == "target" else "",
        )
        held = await self._held.enter_async_context(AsyncExitStack())
        leasing = pool.lease(request, timeout_s=timeout_s, beside=beside.lease if beside else None)
        lease = await held.enter_async_context(leasing)
        self.timings_ms["queue"] += 1e3 * lease.queued_s
        prefill = _in_background(held, self._prefill(role, lease))
        return Holding(role, prompt_ids, lease, prefill, held)

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` beside the caller, at most until the leases are given back."""
        return _in_background(self._held, work)

    def rounds(
        self,
        verifier: Holding,
        source: DraftSource | None,
        choice: int = 0,
        committed: Sequence[int] = (),
        *,
        pace: Pace | None = None,
        on_loss: Callable[[DrafterUnavailable], None] | None = None,
        refresh: Refresh | None = None,
        trigger: RefreshTrigger | None = None,
    ) -> AsyncIterator[Verdict]:
        """Run the rounds of one choice, from where its answer stands; prefills must be complete.

        Args:
            verifier: who judges, and decodes where nothing is drafted.
            source: what drafts; None decodes plainly.
            choice: which of the request's answers.
            committed: its tokens so far.
            pace: see `rapid.speculation.loop.speculate`.
            on_loss: see there.
            refresh: see there.
            trigger: see there.
        """
        return speculate(
            source.drafter(choice, committed) if source else None,
            verifier.lease.verifier(choice, lambda: source.lease if source else None),
            max_tokens=self.terms.max_tokens - len(committed),
            max_draft=self.terms.speculation.max_draft,
            is_streamed=self.terms.is_streamed,
            pace=pace,
            on_loss=on_loss,
            refresh=refresh,
            trigger=trigger,
        )

    async def _prefill(self, role: Role, lease: EngineLease) -> PrefillReceipt:
        began = time.monotonic()
        receipt = await lease.prefill()
        self.timings_ms[f"{role}_prefill"] += 1e3 * (time.monotonic() - began)
        return receipt


def _in_background(held: AsyncExitStack, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Run `work` until `held` is closed; whoever awaits it gets its failure."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    held.callback(task.cancel)
    return task
