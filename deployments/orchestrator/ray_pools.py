"""The pools and leases of `rapid.ports` over Ray."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.leases import HeldLease, hold, hold_beside
from cluster.remote_failures import failure_of
from deployments.orchestrator.call_batches import SharedCalls, find_shared_calls
from deployments.orchestrator.engine_calls import EngineSilent, await_answer, blaming
from deployments.orchestrator.lease_queue import LeaseQueue
from deployments.orchestrator.ray_verifiers import (
    JudgingVerifier,
    RayDrafter,
    RayVerifier,
    VerifierSettings,
)
from deployments.pools.shared_calls import MOST_BYTES
from rapid.config import WindowDrafting
from rapid.engine_status import LeaseUsage
from rapid.errors import (
    DrafterHangs,
    DrafterUnavailable,
    Overloaded,
    RapidError,
    TargetHangs,
    TargetUnavailable,
)
from rapid.messages import LeaseRequest, PrefillReceipt, ReadSoFar
from rapid.ports import EngineLease

_RENEWALS_PER_TTL = 4  # of a lease, within its time-to-live
_CANDIDATE_BYTES = 8  # its id and its probability
_HANGS: dict[type[RapidError], type[RapidError]] = {
    TargetUnavailable: TargetHangs,
    DrafterUnavailable: DrafterHangs,
}


class RayPool:
    """A pool of leasing replicas; see `rapid.ports.EnginePool`."""

    def __init__(
        self,
        handle: DeploymentHandle,
        queue: LeaseQueue,
        lease_ttl_s: float,
        verifiers: VerifierSettings,
        lost: type[RapidError],
        *,
        may_rest: bool = False,
    ) -> None:
        """Store the settings that all leases of the pool share.

        Args:
            handle: The handle of the pool's deployment.
            queue: The requests of this process that wait for one of its leases.
            lease_ttl_s: Seconds after which its engines free a lease that is not renewed.
            verifiers: Settings of its leases' verifiers.
            lost: The error that the loss of one of its engines raises.
            may_rest: Whether a request does without a lease while the pool has no replica.
        """
        self._handle = handle
        self._queue = queue
        self._may_rest = may_rest
        self._renew_every_s = lease_ttl_s / _RENEWALS_PER_TTL
        self._verifiers = verifiers
        self._lost = lost

    @asynccontextmanager
    async def lease(
        self,
        request: LeaseRequest,
        *,
        timeout_s: float | None,
        beside: EngineLease | None,
    ) -> AsyncIterator[RayLease]:
        """Hold a lease on one of the replicas; see `rapid.ports.EnginePool`."""
        wait_s = math.inf if timeout_s is None else timeout_s
        lost, every_s, queue = self._lost, self._renew_every_s, self._queue
        counted: AbstractContextManager[None] = nullcontext()
        if beside is None:
            queue.check_room(request)
            holding = hold(
                self._handle,
                request,
                timeout_s=wait_s,
                renew_every_s=every_s,
                lost=lost,
                turn=lambda: queue.turn(request),
                may_rest=self._may_rest,
            )
            counted = queue.hold()
        else:
            assert isinstance(beside, RayLease)
            holding = hold_beside(
                beside.held, request, timeout_s=wait_s, renew_every_s=every_s, lost=lost
            )
        async with AsyncExitStack() as stack:
            try:
                held = await stack.enter_async_context(holding)
            except Overloaded as error:
                raise type(error)(str(error), error.retry_after_s or queue.retry_after_s) from None
            stack.enter_context(counted)
            yield RayLease(held, request, self._verifiers, lost, queue)


class RayLease:
    """A lease on an engine's actor; see `rapid.ports.EngineLease`."""

    def __init__(
        self,
        held: HeldLease,
        request: LeaseRequest,
        verifiers: VerifierSettings,
        lost: type[RapidError],
        queue: LeaseQueue,
    ) -> None:
        self.held = held
        self._queue = queue
        self._request = request
        self._verifiers = verifiers
        self._lost = lost

    @property
    def lease_id(self) -> str:
        """The lease's id on the engine."""
        return self.held.lease_id

    @property
    def queued_s(self) -> float:
        """Seconds that the request waited for the lease."""
        return self.held.queued_s

    async def prefill(self) -> PrefillReceipt:
        """Prefill the prompt on the engine."""
        receipt: PrefillReceipt = await self._call(self.held.engine.prefill)
        return receipt

    async def read_so_far(self) -> ReadSoFar:
        """Ask the engine how many tokens of the prompt it has read."""
        read: ReadSoFar = await self._call(self.held.engine.read_so_far)
        return read

    async def settle(self) -> LeaseUsage:
        """Ask the engine what the lease used, and charge it to the tenant in the pool's queue."""
        used: LeaseUsage = await self._call(self.held.engine.settle)
        self._queue.charge(self._request, used)
        return used

    async def _call(self, method: Any) -> Any:
        """Call a method with the lease's id; the call takes as long as the engine lives."""
        silent_s = self._verifiers.patience.silent_s
        try:
            return await await_answer(self.held, method.remote(self.lease_id), silent_s=silent_s)
        except EngineSilent:
            raise blaming(self.held, _HANGS[self._lost]("The engine is silent.")) from None
        except Exception as error:
            failed = failure_of(error).as_rapid_error("engine", self._lost)
            raise blaming(self.held, failed) from None

    def forgo_companion(self) -> None:
        """Tell the engine, without waiting, that no second lease will be opened beside this one."""
        self.held.engine.forgo_companion.remote(self.lease_id)

    def drafter(self, choice: int, window: WindowDrafting | None = None) -> RayDrafter:
        """Return the drafter of a choice on this lease; windows are for in-process runs."""
        if window is not None:
            raise NotImplementedError("no server drafts on a window of its KV")
        return RayDrafter(self.held, choice, self._calls() if self._has_small_blocks else None)

    @property
    def _has_small_blocks(self) -> bool:
        """Whether several blocks go into one of Ray's messages."""
        speculation = self._request.terms.speculation
        if speculation.draft_top_k is None:
            return False
        return speculation.max_draft * speculation.draft_top_k * _CANDIDATE_BYTES <= MOST_BYTES

    def _calls(self) -> SharedCalls | None:
        """Return the calls that are shared with other loops; a block judged here comes alone."""
        return find_shared_calls(self.held.engine) if self._verifiers.site == "target" else None

    def verifier(
        self,
        choice: int,
        drafter: Callable[[], EngineLease | None],
        witness: Callable[[], EngineLease | None] = lambda: None,
    ) -> RayVerifier:
        """Return the verifier of a choice's blocks, which judges them at the configured site."""

        def drafting() -> HeldLease | None:
            return _hold(drafter())

        def witnessing() -> HeldLease | None:
            return _hold(witness())

        patience = self._verifiers.patience
        if self._verifiers.site == "target":
            return RayVerifier(self.held, drafting, patience, choice, witnessing, self._calls())
        return JudgingVerifier(
            self.held,
            drafting,
            patience,
            choice,
            self._request,
            self._verifiers.eos_ids,
            witnessing,
        )


def _hold(lease: EngineLease | None) -> HeldLease | None:
    return lease.held if isinstance(lease, RayLease) else None
