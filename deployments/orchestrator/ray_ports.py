"""The ports of `rapid.ports` over Ray: pools, leases, drafters and verifiers.

A draft block is an object reference, which goes from the drafter's call into the target's without
being opened in this process; only the small verdict is. Ray itself carries blocks up to 100 KB
through this process, inside its messages, and leaves larger ones where they were made. A
`JudgingVerifier` does open them. A block of prompt lookup is made in this process and sent along
with the call.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray import ObjectRef
from ray.serve.handle import DeploymentHandle

from cluster.failures import FailureKind, failure_of
from cluster.leases import HeldLease, hold, hold_beside
from deployments.orchestrator.lease_queue import LeaseQueue
from rapid.config import WindowDrafting
from rapid.errors import (
    BadRequest,
    DrafterHangs,
    DrafterUnavailable,
    EngineFailed,
    Overloaded,
    RapidError,
    TargetHangs,
    TargetUnavailable,
)
from rapid.estimators import Patience
from rapid.messages import (
    DraftBlock,
    LeaseRequest,
    PrefillReceipt,
    TargetLogits,
    Verdict,
)
from rapid.ports import EngineLease

_RENEWALS_PER_TTL = 4
_LOOK_S = 1.0
_LOOK_EVERY_S = 2.0
_FAILURES = (TargetUnavailable, EngineFailed, DrafterUnavailable, DrafterHangs)
_HANGS: dict[type[RapidError], type[RapidError]] = {
    TargetUnavailable: TargetHangs,
    DrafterUnavailable: DrafterHangs,
}


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    """Settings of verifiers, the same for all requests.

    Attributes:
        patience: How long a block may take, and how long an engine may be silent.
        site: Where blocks are judged: `target` beside the target's logits, `orchestrator` in this
            process.
        eos_ids: Tokens that end an answer.
    """

    patience: Patience
    site: Literal["target", "orchestrator"]
    eos_ids: frozenset[int]


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
            counted = queue.held()
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
            yield RayLease(held, request, self._verifiers, lost)


class RayLease:
    """A lease on an engine's actor; see `rapid.ports.EngineLease`."""

    def __init__(
        self,
        held: HeldLease,
        request: LeaseRequest,
        verifiers: VerifierSettings,
        lost: type[RapidError],
    ) -> None:
        self.held = held
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
        receipt: PrefillReceipt = await self._answered(self.held.engine.prefill)
        return receipt

    async def num_read(self) -> int:
        """Ask the engine how many tokens of the prompt it has read."""
        num_read: int = await self._answered(self.held.engine.num_read)
        return num_read

    async def _answered(self, method: Any) -> Any:
        """Call a method with the lease's id; the call takes as long as the engine lives."""
        call = asyncio.ensure_future(method.remote(self.lease_id))
        call.add_done_callback(_retrieve)
        try:
            silent_s = self._verifiers.patience.silent_s
            while not await self.held.is_over(call, after_s=_LOOK_EVERY_S, silent_s=silent_s):
                pass
        except TimeoutError:
            raise _blaming(self.held, _HANGS[self._lost]("The engine is silent.")) from None
        finally:
            call.cancel()
        try:
            return call.result()
        except Exception as error:
            failed = failure_of(error).as_rapid_error("engine", self._lost)
            raise _blaming(self.held, failed) from None

    def forgo_companion(self) -> None:
        """Tell the engine, without waiting, that no second lease will be opened beside this one."""
        self.held.engine.forgo_companion.remote(self.lease_id)

    def drafter(self, choice: int) -> RayDrafter:
        """Return the drafter of a choice on this lease."""
        return RayDrafter(self.held, choice)

    def window_drafter(self, choice: int, window: WindowDrafting) -> RayDrafter:
        """Raise `NotImplementedError`: drafting on a window of the KV is for in-process runs."""
        raise NotImplementedError("no server drafts on a window of its KV")

    def verifier(
        self,
        choice: int,
        drafter: Callable[[], EngineLease | None],
        witness: Callable[[], EngineLease | None] = lambda: None,
    ) -> RayVerifier:
        """Return the verifier of a choice's blocks, which judges them at the configured site."""

        def drafting() -> HeldLease | None:
            return _held(drafter())

        def witnessing() -> HeldLease | None:
            return _held(witness())

        patience = self._verifiers.patience
        if self._verifiers.site == "target":
            return RayVerifier(self.held, drafting, patience, choice, witnessing)
        return JudgingVerifier(
            self.held,
            drafting,
            patience,
            choice,
            self._request,
            self._verifiers.eos_ids,
            witnessing,
        )


def _held(lease: EngineLease | None) -> HeldLease | None:
    return lease.held if isinstance(lease, RayLease) else None


class RayDrafter:
    """A drafter of one choice on a lease's engine."""

    def __init__(self, lease: HeldLease, choice: int = 0) -> None:
        self._lease = lease
        self._choice = choice

    def draft(self, verdict: Verdict | None, num_tokens: int) -> ObjectRef:
        """Start drafting and return the block's reference; see `rapid.ports.Drafter`."""
        if verdict is not None and verdict.logprobs:
            verdict = replace(verdict, logprobs=())
        lease = self._lease
        return lease.engine.draft.remote(lease.lease_id, self._choice, verdict, num_tokens)


class RayVerifier:
    """A verifier whose blocks are judged on the target's engine, beside its logits."""

    def __init__(
        self,
        target: HeldLease,
        drafter: Callable[[], HeldLease | None],
        patience: Patience,
        choice: int = 0,
        witness: Callable[[], HeldLease | None] = lambda: None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._patience = patience
        self._choice = choice
        self._witness = witness

    async def verify(self, block: ObjectRef | DraftBlock) -> Verdict:
        """Judge a block on the target's engine; see `rapid.ports.Verifier`.

        Raises:
            DrafterHangs: If the block does not arrive within the limit of the patience.
        """
        witness = self._witness()
        also = (witness.lease_id,) if witness else ()
        verdict: Verdict = await self._ask_about(
            block, self._target.engine.verify, self._target, *also
        )
        return verdict

    async def decode(self, num_tokens: int) -> Verdict:
        """Decode with the target alone; see `rapid.ports.Verifier`."""
        reference = self._target.engine.decode.remote(
            self._target.lease_id, self._choice, num_tokens
        )
        verdict: Verdict = await self._answered(reference)
        return verdict

    async def _ask_about(
        self, block: ObjectRef | DraftBlock, method: Any, lease: HeldLease, *also: object
    ) -> Any:
        """Call an engine's method with a block that is still being drafted and may never arrive."""
        reference = method.remote(lease.lease_id, self._choice, block, *also)
        if isinstance(block, DraftBlock):
            return await self._answered(reference)
        began = time.monotonic()
        found = await self._answered(reference, block)
        self._patience.observe(time.monotonic() - began)
        return found

    async def _answered(
        self, reference: Awaitable[Any], block: Awaitable[object] | None = None
    ) -> Any:
        """Await an answer of the target, which may take long while the target lives.

        Args:
            reference: The call.
            block: The block that the call waits for, if it is still being drafted.

        Raises:
            DrafterHangs: The block has not come in time.
            TargetHangs: The target gives no sign of life.
        """
        call = asyncio.ensure_future(reference)
        call.add_done_callback(_retrieve)
        silent_s, limit_s = self._patience.silent_s, self._patience.limit_s
        drafted_by = time.monotonic() + limit_s if block is not None else math.inf
        try:
            while True:
                after_s = min(_LOOK_EVERY_S, max(drafted_by - time.monotonic(), 0.0))
                if await self._target.is_over(call, after_s=after_s, silent_s=silent_s):
                    break
                if block is not None and time.monotonic() >= drafted_by:
                    if not await _has_come(block):
                        hangs = DrafterHangs(f"The drafter has not answered within {limit_s:g} s.")
                        raise self._blaming_drafter(hangs)
                    drafted_by = math.inf  # the target is slow
        except TimeoutError:
            raise _blaming(self._target, TargetHangs("The target is silent.")) from None
        finally:
            call.cancel()
        try:
            return call.result()
        except Exception as error:
            raise self._classified(error) from None

    def _classified(self, error: Exception) -> RapidError:
        """Attribute the failure of a call on the target to the target or the drafter.

        A call that was passed a failed draft fails too. If the drafter is lost, the result is
        `DrafterUnavailable`, after which the answer continues. Any other error of the drafter is a
        bug, after which no answer should continue.
        """
        failure = failure_of(error)
        drafter = self._drafter()
        if failure.kind is FailureKind.OBJECT_LOST:
            lost = DrafterUnavailable("The drafter's block was lost with its machine.")
            return self._blaming_drafter(lost)
        is_targets = failure.is_death_of(self._target.engine)  # which may draft for itself
        if drafter is not None and not is_targets and failure.is_death_of(drafter.engine):
            return _blaming(drafter, failure.as_rapid_error("drafter", DrafterUnavailable))
        if isinstance(failure.cause, BadRequest):  # a malformed block is not the client's error
            return EngineFailed(f"The drafter's block cannot be judged: {failure.cause}")
        if isinstance(failure.cause, DrafterUnavailable):
            return self._blaming_drafter(failure.cause)
        return _blaming(self._target, failure.as_rapid_error("target", TargetUnavailable))

    def _blaming_drafter(self, error: RapidError) -> RapidError:
        drafter = self._drafter()
        return error if drafter is None else _blaming(drafter, error)


def _blaming(lease: HeldLease, error: RapidError) -> RapidError:
    """Return `error`; if it is a failure of the lease's engine, blame that."""
    if isinstance(error, _FAILURES):
        lease.blame()
    return error


def _retrieve(call: asyncio.Future[Any]) -> None:
    """Retrieve an error that nobody may wait for any more, so that asyncio does not report it."""
    if not call.cancelled():
        call.exception()


async def _has_come(block: Awaitable[object]) -> bool:
    """Return whether a block was drafted or failed, waiting `_LOOK_S` seconds; this fetches it."""
    try:
        async with asyncio.timeout(_LOOK_S):
            await block
    except TimeoutError:
        return False
    except Exception:
        return True
    return True


class JudgingVerifier(RayVerifier):
    """A verifier that judges blocks in this process, for `acceptance_site: orchestrator`."""

    def __init__(
        self,
        target: HeldLease,
        drafter: Callable[[], HeldLease | None],
        patience: Patience,
        choice: int,
        request: LeaseRequest,
        eos_ids: Set[int],
        witness: Callable[[], HeldLease | None] = lambda: None,
    ) -> None:
        super().__init__(target, drafter, patience, choice, witness)
        self._request = request
        self._eos_ids = eos_ids
        self._log_odds = request.log_odds[choice] if request.log_odds else 0.0

    async def verify(self, block: ObjectRef | DraftBlock) -> Verdict:
        """Judge a block in this process, then commit the verdict on the target's engine."""
        engine, witness = self._target.engine, self._witness()
        leases = [self._target, witness] if witness else [self._target]
        scored: list[TargetLogits] = await asyncio.gather(
            *(self._ask_about(block, engine.score, lease) for lease in leases)
        )
        drafted = block if isinstance(block, DraftBlock) else await self._answered(block)
        verdict = await asyncio.to_thread(self._judge, drafted, *scored)
        commits = [engine.commit.remote(lease.lease_id, verdict) for lease in leases]
        await asyncio.gather(*map(self._answered, commits))
        self._log_odds = verdict.log_odds
        return verdict

    def _judge(
        self, block: DraftBlock, scored: TargetLogits, witness: TargetLogits | None = None
    ) -> Verdict:
        import torch

        from rapid.speculation.acceptance import judge
        from rapid.speculation.draw import Draw

        request = self._request
        draw = Draw(request.sampling, request.speculation, block.choice, block.position)
        logits, told = (  # Ray's arrays are read-only
            None if each is None else torch.from_numpy(each.logits.copy())
            for each in (scored, witness)
        )
        assert logits is not None
        judgement = judge(
            block, logits, draw, self._eos_ids, request.num_logprobs, self._log_odds, told
        )
        return judgement.verdict(block, scored.verify_ms)
