"""The loop's ports over Ray: one choice of a lease each.

A block is an object reference. It goes from the drafter's engine to the target's without being
opened here; only the small verdict comes back. A block of prompt lookup is made here and is sent
along with the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Set
from dataclasses import replace
from typing import Any

from ray import ObjectRef
from ray.exceptions import ObjectLostError

from cluster.failures import as_rapid_error, is_death_of, unwrapped
from cluster.leases import Lease
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import DrafterUnavailable, RapidError, TargetUnavailable
from rapid.messages import DraftBlock, TargetLogits, Verdict


class RayDrafter:
    """Drafts one choice on the engine of a lease."""

    def __init__(self, lease: Lease, choice: int = 0) -> None:
        self._lease = lease
        self._choice = choice

    def draft(self, verdict: Verdict | None, num_tokens: int) -> ObjectRef:
        """Start drafting; see `rapid.ports.Drafter`."""
        if verdict is not None and verdict.logprobs:
            verdict = replace(verdict, logprobs=())
        lease = self._lease
        return lease.engine.draft.remote(lease.lease_id, self._choice, verdict, num_tokens)


class RayVerifier:
    """Has blocks judged where the target's logits are."""

    def __init__(self, target: Lease, drafter: Lease | None, choice: int = 0) -> None:
        self._target = target
        self._drafter = drafter
        self._choice = choice

    async def verify(self, block: ObjectRef | DraftBlock) -> Verdict:
        """Judge a block; see `rapid.ports.Verifier`."""
        verdict: Verdict = await self._ask(self._target.engine.verify, self._choice, block)
        return verdict

    async def decode(self, num_tokens: int) -> Verdict:
        """Decode without a drafter; see `rapid.ports.Verifier`."""
        verdict: Verdict = await self._ask(self._target.engine.decode, self._choice, num_tokens)
        return verdict

    async def _ask(self, method: Any, *args: object) -> Any:
        return await self._answered(method.remote(self._target.lease_id, *args))

    async def _answered(self, reference: Awaitable[Any]) -> Any:
        try:
            return await reference
        except Exception as error:
            raise self._classified(error) from None

    def _classified(self, error: Exception) -> RapidError:
        """Whose failure it is: a block that never came fails the target's call."""
        cause = unwrapped(error)
        drafter = self._drafter
        if isinstance(cause, ObjectLostError):
            return DrafterUnavailable("The drafter's block was lost with its machine.")
        if drafter is not None and is_death_of(cause, drafter.engine):
            return as_rapid_error(cause, "drafter", DrafterUnavailable)
        return as_rapid_error(cause, "target", TargetUnavailable)


class JudgingVerifier(RayVerifier):
    """Fetches the target's logits and judges here: `acceptance_site: orchestrator`."""

    def __init__(
        self,
        target: Lease,
        drafter: Lease | None,
        choice: int,
        sampling: SamplingConfig,
        speculation: SpeculationConfig,
        eos_ids: Set[int],
        num_logprobs: int | None,
    ) -> None:
        super().__init__(target, drafter, choice)
        self._rule = (sampling, speculation, eos_ids, num_logprobs)

    async def verify(self, block: ObjectRef | DraftBlock) -> Verdict:
        """Judge a block; see `rapid.ports.Verifier`."""
        scored: TargetLogits = await self._ask(self._target.engine.score, self._choice, block)
        drafted = block if isinstance(block, DraftBlock) else await self._answered(block)
        verdict = await asyncio.to_thread(self._judge, drafted, scored)
        await self._ask(self._target.engine.commit, verdict)
        return verdict

    def _judge(self, block: DraftBlock, scored: TargetLogits) -> Verdict:
        import torch

        from rapid.speculation.acceptance import judge

        logits = torch.from_numpy(scored.logits.copy())  # Ray's arrays are read-only
        return judge(block, logits, *self._rule).verdict(block, scored.verify_ms)
