"""The loop's ports over Ray: one choice of a lease each.

A block is an object reference. It goes from the drafter's engine to the target's without being
opened here; only the small verdict comes back. A block of prompt lookup is made here and is sent
along with the call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Set
from dataclasses import replace
from typing import Any

from ray import ObjectRef
from ray.exceptions import ObjectLostError

from cluster.failures import as_rapid_error, is_death_of, unwrapped
from cluster.leases import Lease
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import (
    BadRequest,
    DrafterHangs,
    DrafterUnavailable,
    EngineFailed,
    RapidError,
    TargetUnavailable,
)
from rapid.messages import DraftBlock, TargetLogits, Verdict

_TIMES_THE_LONGEST = 10.0
_FORGET = 0.99  # of the longest round, with each that is shorter
_LOOK_S = 1.0


class Patience:
    """How long a drafter may take before it counts as hung; shared by the requests of a process.

    Never less than `floor_s`, and ten times what the longest round of late took: a round waits for
    whatever else the engines do, so that its usual length says little and its longest much.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._longest_s = 0.0

    @property
    def limit_s(self) -> float:
        """Seconds."""
        return max(self._floor_s, _TIMES_THE_LONGEST * self._longest_s)

    def observe(self, seconds: float) -> None:
        """A round with a drafter took so long."""
        self._longest_s = max(seconds, _FORGET * self._longest_s)


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

    def __init__(
        self, target: Lease, drafter: Lease | None, patience: Patience, choice: int = 0
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._patience = patience
        self._choice = choice

    async def verify(self, block: ObjectRef | DraftBlock) -> Verdict:
        """Judge a block; see `rapid.ports.Verifier`.

        Raises:
            DrafterHangs: the block does not come.
        """
        verdict: Verdict = await self._ask_about(block, self._target.engine.verify)
        return verdict

    async def decode(self, num_tokens: int) -> Verdict:
        """Decode without a drafter; see `rapid.ports.Verifier`."""
        verdict: Verdict = await self._ask(self._target.engine.decode, self._choice, num_tokens)
        return verdict

    async def _ask_about(self, block: ObjectRef | DraftBlock, method: Any) -> Any:
        """Ask with a block that is still being drafted, and may never come."""
        if isinstance(block, DraftBlock):
            return await self._ask(method, self._choice, block)
        reference = method.remote(self._target.lease_id, self._choice, block)
        asked = asyncio.ensure_future(self._answered(reference))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        began, limit_s = time.monotonic(), self._patience.limit_s
        try:
            done, _ = await asyncio.wait({asked}, timeout=limit_s)
            if not done and not await _has_come(block):
                raise DrafterHangs(f"The drafter has not answered within {limit_s:g} s.")
            found = await asked  # not done: it is the target that takes so long
        finally:
            asked.cancel()
        self._patience.observe(time.monotonic() - began)
        return found

    async def _ask(self, method: Any, *args: object) -> Any:
        return await self._answered(method.remote(self._target.lease_id, *args))

    async def _answered(self, reference: Awaitable[Any]) -> Any:
        try:
            return await reference
        except Exception as error:
            raise self._classified(error) from None

    def _classified(self, error: Exception) -> RapidError:
        """Return whose failure it is: a block that never came fails the target's call.

        A drafter that is lost says so itself, or has died. What else its call raises is a bug, and
        stays one: no answer goes on after it.
        """
        cause = unwrapped(error)
        drafter = self._drafter
        if isinstance(cause, ObjectLostError):
            return DrafterUnavailable("The drafter's block was lost with its machine.")
        if drafter is not None and is_death_of(cause, drafter.engine):
            return as_rapid_error(cause, "drafter", DrafterUnavailable)
        if isinstance(cause, BadRequest):  # a block that is malformed: no mistake of the client's
            return EngineFailed(f"The drafter's block cannot be judged: {cause}")
        return as_rapid_error(cause, "target", TargetUnavailable)


async def _has_come(block: Awaitable[object]) -> bool:
    """Whether a block was drafted, or failed; opens it, which nobody does here otherwise."""
    try:
        async with asyncio.timeout(_LOOK_S):
            await block
    except TimeoutError:
        return False
    except Exception:
        return True
    return True


class JudgingVerifier(RayVerifier):
    """Fetches the target's logits and judges here: `acceptance_site: orchestrator`."""

    def __init__(
        self,
        target: Lease,
        drafter: Lease | None,
        patience: Patience,
        choice: int,
        sampling: SamplingConfig,
        speculation: SpeculationConfig,
        eos_ids: Set[int],
        num_logprobs: int | None,
    ) -> None:
        super().__init__(target, drafter, patience, choice)
        self._rule = (sampling, speculation, eos_ids, num_logprobs)

    async def verify(self, block: ObjectRef | DraftBlock) -> Verdict:
        """Judge a block; see `rapid.ports.Verifier`."""
        scored: TargetLogits = await self._ask_about(block, self._target.engine.score)
        drafted = block if isinstance(block, DraftBlock) else await self._answered(block)
        verdict = await asyncio.to_thread(self._judge, drafted, scored)
        await self._ask(self._target.engine.commit, verdict)
        return verdict

    def _judge(self, block: DraftBlock, scored: TargetLogits) -> Verdict:
        import torch

        from rapid.speculation.acceptance import judge

        logits = torch.from_numpy(scored.logits.copy())  # Ray's arrays are read-only
        return judge(block, logits, *self._rule).verdict(block, scored.verify_ms)
