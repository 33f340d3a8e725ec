"""Sessions: the leases, prefills and rounds of one request on its engines.

::

    target lease ── target prefill ──────────────────────────┐
         └────────── drafter lease ── drafter prefill ───────┴── rounds of each choice

Engines are reached through `rapid.ports.EnginePool`, which `rapid.engines.local_ports` implements
for engines in this process and `deployments.orchestrator.ray_pools` for pools of replicas. Drafts
come from a `DraftSource`, of which `rapid.answering.leases.sources` has one class for each kind.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from rapid.answering.leases.round_spans import TracedVerifier
from rapid.engine_status import LeaseUsage
from rapid.errors import DrafterUnavailable, RapidError
from rapid.messages import Int32Array, LeaseRequest, PrefillReceipt, Terms, Verdict
from rapid.ports import Drafter, EngineLease, EnginePool, Pace, Refresh
from rapid.speculation.loop import speculate
from rapid.speculation.pace.refreshing import RefreshTrigger
from rapid.tracing import current_traceparent, span

if TYPE_CHECKING:
    from rapid.config import KVCacheDtype

Result = TypeVar("Result")
Role = Literal["target", "drafter", "witness"]
Committed = Sequence[Sequence[int]]

_SETTLING_S = 1.0  # longest wait at an answer's end for what it used; an engine may be lost by then


@dataclass(frozen=True, slots=True)
class Holding:
    """A held lease with its prompt; the prefill began when the lease was taken."""

    role: Role
    prompt_ids: Int32Array
    lease: EngineLease
    prefill: asyncio.Task[PrefillReceipt]
    _held: AsyncExitStack

    async def check(self) -> None:
        """Raise an error if the lease is lost, or the engine that holds it.

        Raises:
            RapidError: The engine died, is closed or silent, or it has ended the lease.
        """
        await self.lease.read_so_far()

    async def release(self) -> None:
        """Release the lease before the session ends."""
        await self._held.aclose()


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What a draft source needs to take its leases: session, target lease and prompt.

    Attributes:
        session: The session that takes the lease.
        verifier: The target's lease, with its prompt.
        prompt_ids: Prompt of a drafter model; other sources read the target's prompt.
        witness_ids: Prompt of the witness, or None if there is none.
        passages: Parts of the drafter's prompt that it may read each by itself.
        timeout_s: Longest wait for room, in seconds; None waits without limit.
        committed: For each choice, its tokens so far.
    """

    session: Session
    verifier: Holding
    prompt_ids: Int32Array | None
    timeout_s: float | None = None
    committed: Committed = ()
    witness_ids: Int32Array | None = None
    passages: Sequence[tuple[int, int]] = ()

    async def take(
        self, pool: EnginePool, role: Role, prompt_ids: Int32Array | None, *, is_beside: bool
    ) -> Holding:
        """Take a lease for drafting; see `Session.take`.

        Args:
            pool: Pool to take the lease from.
            role: Role of the engine in this request.
            prompt_ids: Token ids of the prompt, which the source needs.
            is_beside: Whether the lease is taken on the verifier's own engine.
        """
        assert prompt_ids is not None
        return await self.session.take(
            pool,
            role,
            prompt_ids,
            timeout_s=self.timeout_s,
            committed=self.committed,
            beside=self.verifier if is_beside else None,
            passages=self.passages if role == "drafter" else (),
        )


class DraftSource(ABC):
    """A source of drafts for all choices of one request, of a kind in `answering.leases.sources`.

    Attributes:
        companion_tokens: Length, in tokens, of the prompt for which the target's engine keeps room,
            because the source will take a second lease there; 0 if it will not.
    """

    companion_tokens = 0

    @property
    def lease(self) -> EngineLease | None:
        """The lease on which the source drafts now, if it has one of its own."""
        return None

    @property
    def witness(self) -> EngineLease | None:
        """The lease on which the target reads what the drafter has read, if there is one."""
        return None

    @abstractmethod
    async def hold(self, needs: DraftNeeds) -> None:
        """Take the lease that drafting needs, if any, and release the previous one.

        Raises:
            RapidError: No lease is available; see `Session.take`.
        """

    @abstractmethod
    def drafter(self, choice: int, committed: Sequence[int] = ()) -> Drafter[Any]:
        """Return a drafter for a choice, to continue after its `committed` tokens."""

    async def read(self) -> None:  # noqa: B027 (most sources read nothing of their own)
        """Wait for the prefill of the source's own prompt."""

    async def num_read(self) -> int:
        """Return how many tokens of its own prompts have been read so far.

        Raises:
            RapidError: An engine cannot be asked, or a lease has ended.
        """
        return 0

    async def release(self) -> None:  # noqa: B027 (most sources hold no lease of their own)
        """Release the source's own lease, after which it cannot draft."""


class Session:
    """The leases of one request; leaving the session's context releases them.

    Attributes:
        timings_ms: Total milliseconds waited for leases (``queue``) and for the prefills of each
            role.
        kv_cache_dtype: That of the engines that keep KV in eight bits, by role.
        drafter_prefill: The receipt of the drafter's last prefill; None before.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = replace(terms, answer_id=secrets.token_hex(8))
        self.kv_cache_dtype: dict[str, KVCacheDtype] = {}
        self.drafter_prefill: PrefillReceipt | None = None
        self.timings_ms = {"queue": 0.0, "target_prefill": 0.0, "drafter_prefill": 0.0}
        self._held = AsyncExitStack()
        self._leases: list[tuple[Role, EngineLease]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release_all()

    async def release_all(self) -> None:
        """Release all leases; new ones may be taken afterwards."""
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
        log_odds: Sequence[float] = (),
        companion_tokens: int = 0,
        beside: Holding | None = None,
        affinity: str = "",
        terms: Terms | None = None,
        masks: Sequence[tuple[int, int]] = (),
        scored_from: int | None = None,
        passages: Sequence[tuple[int, int]] = (),
    ) -> Holding:
        """Take a lease and begin its prefill.

        Args:
            pool: Pool to take the lease from.
            role: Role of the engine in this request.
            prompt_ids: Token ids of the prompt.
            timeout_s: Longest wait for room, in seconds; None waits without limit.
            committed: For each choice, tokens generated on a lease that was lost or released.
            log_odds: For each choice, those of its last verdict, where blocks are judged.
            companion_tokens: Approximate length, in tokens, of the prompt of a second lease on this
                engine.
            beside: The request's first lease on this engine.
            affinity: Name of what the prompt is about; see `LeaseRequest`.
            terms: Settings of this lease alone; None takes the session's.
            masks: Parts of the prompt that the committed tokens do not see; see `LeaseRequest`.
            scored_from: First token of the prompt to be scored; see `LeaseRequest`.
            passages: Parts of the prompt to be read by themselves; see `LeaseRequest`.

        Raises:
            Overloaded: There was no room in time.
            RapidError: The pool cannot be reached, or it refused the prompt.
        """
        terms = terms or self.terms
        request = LeaseRequest(
            # The suffix is unique, so that a late call never reaches another lease of the request.
            lease_id=f"{terms.request_id}/{role}-{secrets.token_hex(6)}",
            terms=terms,
            prompt_ids=prompt_ids,
            committed=tuple(tuple(each) for each in committed),
            log_odds=tuple(log_odds),
            companion_tokens=companion_tokens,
            beside=beside.lease.lease_id if beside else None,
            affinity=affinity,
            traceparent=current_traceparent(),
            masks=tuple(masks),
            scored_from=scored_from,
            passages=tuple(passages),
        )
        held = await self._held.enter_async_context(AsyncExitStack())
        leasing = pool.lease(request, timeout_s=timeout_s, beside=beside.lease if beside else None)
        with span("lease", role=role):
            lease = await held.enter_async_context(leasing)
        self._leases.append((role, lease))
        held.callback(self._leases.remove, (role, lease))
        self.timings_ms["queue"] += 1e3 * lease.queued_s
        prefill = _in_background(held, self._prefill(role, lease))
        return Holding(role, prompt_ids, lease, prefill, held)

    async def settle(self) -> dict[Role, LeaseUsage]:
        """Return what the leases that are held used of their engines, by role.

        Of an engine that does not answer nothing is known. What leases used that were released
        before is told with the next one of their tenant (`rapid.engines.kv.leases.spending`).
        """
        asking = {self.begin(one.settle()): role for role, one in self._leases}
        if asking:
            await asyncio.wait(asking, timeout=_SETTLING_S)
        used: dict[Role, LeaseUsage] = {}
        for task, role in asking.items():
            if task.cancel():
                continue
            if not isinstance(error := task.exception(), RapidError | None):
                raise error
            if error is None:
                used[role] = used.get(role, LeaseUsage()) + task.result()
        return used

    def begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work` in the background, at most until the leases are released."""
        return _in_background(self._held, work)

    def rounds(
        self,
        verifier: Holding,
        source: DraftSource | None,
        choice: int = 0,
        committed: Sequence[int] = (),
        *,
        drafter: Drafter[Any] | None = None,
        pace: Pace | None = None,
        on_loss: Callable[[DrafterUnavailable], Drafter[Any] | None] | None = None,
        refresh: Refresh | None = None,
        trigger: RefreshTrigger | None = None,
    ) -> AsyncIterator[Verdict]:
        """Run the rounds of one choice after its `committed` tokens; prefills must be complete.

        Args:
            verifier: The lease that judges, and decodes where nothing is drafted.
            source: Source of drafts; None decodes plainly, unless there is a `drafter`.
            choice: Index of the request's answer.
            committed: Tokens of the answer so far.
            drafter: Who drafts, where the source is not alone.
            pace: See `rapid.speculation.loop.speculate`.
            on_loss: See `rapid.speculation.loop.speculate`.
            refresh: See `rapid.speculation.loop.speculate`.
            trigger: See `rapid.speculation.loop.speculate`.
        """
        judge = verifier.lease.verifier(
            choice,
            lambda: source.lease if source else None,
            lambda: source.witness if source else None,
        )
        if drafter is None and source is not None:
            drafter = source.drafter(choice, committed)
        return speculate(
            drafter,
            TracedVerifier(judge, choice),
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
        with span("prefill", role=role) as recorded:
            receipt = await lease.prefill()
            recorded.set_attribute("rapid.prompt_tokens", receipt.num_tokens)
            recorded.set_attribute("rapid.cached_tokens", receipt.num_cached_tokens)
        if role == "drafter":
            self.drafter_prefill = receipt
        name = f"{role}_prefill"
        taken_ms = 1e3 * (time.monotonic() - began)
        self.timings_ms[name] = self.timings_ms.get(name, 0.0) + taken_ms
        if receipt.kv_cache_dtype != "auto":
            self.kv_cache_dtype[role] = receipt.kv_cache_dtype
        return receipt


def _in_background(held: AsyncExitStack, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Run `work` as a task until `held` is closed; a failure is raised only where it is awaited."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    held.callback(task.cancel)
    return task
