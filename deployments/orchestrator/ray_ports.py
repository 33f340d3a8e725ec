"""The ports of `rapid.ports` over Ray: pools, leases, drafters, verifiers and retrieval.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray import ObjectRef
from ray.serve.handle import DeploymentHandle

from cluster.failures import FailureKind, failure_of
from cluster.leases import HeldLease, hold, hold_beside
from rapid.config import WindowDrafting
from rapid.errors import (
    BadRequest,
    DrafterHangs,
    DrafterUnavailable,
    EngineFailed,
    RapidError,
    TargetUnavailable,
)
from rapid.estimators import Patience
from rapid.messages import (
    Document,
    DraftBlock,
    LeaseRequest,
    PrefillReceipt,
    TargetLogits,
    Verdict,
)
from rapid.ports import EngineLease, Found

_RENEWALS_PER_TTL = 4
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class VerifierSettings:
    """Settings of verifiers, the same for all requests.

    Attributes:
        patience: How long a block may take.
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
        lease_ttl_s: float,
        verifiers: VerifierSettings,
        lost: type[RapidError],
        *,
        may_rest: bool = False,
    ) -> None:
        """Store the settings that all leases of the pool share.

        Args:
            handle: The handle of the pool's deployment.
            lease_ttl_s: Seconds after which its engines free a lease that is not renewed.
            verifiers: Settings of its leases' verifiers.
            lost: The error that the loss of one of its engines raises.
            may_rest: Whether a request does without a lease while the pool has no replica.
        """
        self._handle = handle
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
        lost, every_s = self._lost, self._renew_every_s
        if beside is None:
            holding = hold(
                self._handle,
                request,
                timeout_s=wait_s,
                renew_every_s=every_s,
                lost=lost,
                may_rest=self._may_rest,
            )
        else:
            assert isinstance(beside, RayLease)
            lost = DrafterUnavailable
            holding = hold_beside(
                beside.held, request, timeout_s=wait_s, renew_every_s=every_s, lost=lost
            )
        async with holding as held:
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
        try:
            return await method.remote(self.lease_id)
        except Exception as error:
            raise failure_of(error).as_rapid_error("engine", self._lost) from None

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


class RayRetrieval:
    """A client of the retriever deployment; see `rapid.ports.Retrieval`."""

    def __init__(self, handle: DeploymentHandle, timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s

    async def retrieve(
        self, tenant: str, documents: Sequence[Document], query: str, budget_tokens: int
    ) -> Found:
        """Return the passages that the drafter reads.

        Raises:
            DrafterUnavailable: If the retriever fails or does not answer in time.
        """
        response = self._handle.retrieve.remote(tenant, documents, query, budget_tokens)
        try:
            async with asyncio.timeout(self._timeout_s):
                found: Found = await response
        except TimeoutError:
            response.cancel()
            raise DrafterUnavailable(f"no answer within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            raise failure_of(error).as_rapid_error("retriever", DrafterUnavailable) from None
        return found


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
        asked = asyncio.ensure_future(self._answered(reference))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        began, limit_s = time.monotonic(), self._patience.limit_s
        try:
            done, _ = await asyncio.wait({asked}, timeout=limit_s)
            if not done and not await _has_come(block):
                raise DrafterHangs(f"The drafter has not answered within {limit_s:g} s.")
            found = await asked  # not done but drafted: the target is slow
        finally:
            asked.cancel()
        self._patience.observe(time.monotonic() - began)
        return found

    async def _answered(self, reference: Awaitable[Any]) -> Any:
        try:
            return await reference
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
            return DrafterUnavailable("The drafter's block was lost with its machine.")
        is_targets = failure.is_death_of(self._target.engine)  # which may draft for itself
        if drafter is not None and not is_targets and failure.is_death_of(drafter.engine):
            return failure.as_rapid_error("drafter", DrafterUnavailable)
        if isinstance(failure.cause, BadRequest):  # a malformed block is not the client's error
            return EngineFailed(f"The drafter's block cannot be judged: {failure.cause}")
        return failure.as_rapid_error("target", TargetUnavailable)


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
