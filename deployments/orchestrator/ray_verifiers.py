"""Drafters and verifiers of `rapid.ports` over Ray: the calls of a round.

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
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray import ObjectRef

from cluster.leases import HeldLease
from cluster.remote_failures import FailureKind, failure_of
from deployments.orchestrator.call_batches import Call, CallSlot, SharedCalls
from deployments.orchestrator.engine_calls import BlockOverdue, EngineSilent, await_answer, blaming
from deployments.pools.shared_calls import Method
from rapid.errors import (
    BadRequest,
    DrafterHangs,
    DrafterUnavailable,
    EngineFailed,
    GrammarTooComplex,
    RapidError,
    TargetHangs,
    TargetUnavailable,
)
from rapid.estimators import Patience
from rapid.messages import DraftBlock, LeaseRequest, TargetLogits, Verdict


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


class RayDrafter:
    """A drafter of one choice on a lease's engine."""

    def __init__(self, lease: HeldLease, choice: int = 0, calls: SharedCalls | None = None) -> None:
        """Store the lease.

        Args:
            lease: The lease on the drafter's engine.
            choice: Index of the request's answer.
            calls: The calls of that engine by all loops of this process. None sends each draft by
                itself: a block that is judged in this process must be.
        """
        self._lease = lease
        self._choice = choice
        self._calls = calls

    def draft(self, verdict: Verdict | None, num_tokens: int) -> ObjectRef | Call:
        """Start drafting and return the block's reference; see `rapid.ports.Drafter`."""
        if verdict is not None and verdict.logprobs:
            verdict = replace(verdict, logprobs=())
        lease = self._lease
        asked = lease.lease_id, self._choice, verdict, num_tokens
        if self._calls is None:
            return lease.engine.draft.remote(*asked)
        return self._calls.ask("draft", *asked)


class RayVerifier:
    """A verifier whose blocks are judged on the target's engine, beside its logits."""

    def __init__(
        self,
        target: HeldLease,
        drafter: Callable[[], HeldLease | None],
        patience: Patience,
        choice: int = 0,
        witness: Callable[[], HeldLease | None] = lambda: None,
        calls: SharedCalls | None = None,
    ) -> None:
        """Store the lease and what tells its failures from others.

        Args:
            target: The lease on the target's engine.
            drafter: Function that returns the lease that blocks currently come from, or None.
            patience: How long a block may take, and how long an engine may be silent.
            choice: Index of the request's answer.
            witness: Function that returns the lease of the second reading, or None.
            calls: The calls of the target's engine by all loops of this process; None sends each
                by itself.
        """
        self._target = target
        self._drafter = drafter
        self._patience = patience
        self._choice = choice
        self._witness = witness
        self._calls = calls

    async def verify(self, block: ObjectRef | DraftBlock | Call) -> Verdict:
        """Judge a block on the target's engine; see `rapid.ports.Verifier`.

        Raises:
            DrafterHangs: If the block does not arrive within the limit of the patience.
        """
        witness = self._witness()
        also = (witness.lease_id,) if witness else ()
        asked: Awaitable[Any]
        if isinstance(block, Call):
            asked = self._ask_when_sent(block, *also)
        elif isinstance(block, DraftBlock):
            asked = self._ask("verify", block, *also)
        else:  # Ray gives a call what its references stand for, and looks for none inside
            asked = self._target.engine.verify.remote(
                self._target.lease_id, self._choice, block, *also
            )
        verdict: Verdict = await self._time(asked, block)
        return verdict

    async def decode(self, num_tokens: int) -> Verdict:
        """Decode with the target alone; see `rapid.ports.Verifier`."""
        verdict: Verdict = await self._await_answer(self._ask("decode", num_tokens))
        return verdict

    def _ask(self, method: Method, *arguments: object) -> Awaitable[Any]:
        """Call a method of the target's engine, together with other loops if there are any."""
        asked = self._target.lease_id, self._choice, *arguments
        if self._calls is None:
            called: Awaitable[Any] = getattr(self._target.engine, method).remote(*asked)
            return called
        return self._calls.ask(method, *asked)

    async def _ask_when_sent(self, draft: Call, *also: str) -> Any:
        """Have a block judged: one that comes by itself waits for that at the target's engine.

        A block that travels with others is sent on when it has come, with those of them that are
        judged on the same engine.
        """
        target, block = self._target, await draft.await_reference()
        if isinstance(block, CallSlot):
            assert self._calls is not None
            asked = target.lease_id, self._choice, *also
            return await self._calls.ask("verify", *asked, block=block)
        return await target.engine.verify.remote(target.lease_id, self._choice, block, *also)

    async def _time(self, asked: Awaitable[Any], block: Awaitable[object] | DraftBlock) -> Any:
        """Await a call with a block that may be still being drafted and may never arrive."""
        if isinstance(block, DraftBlock):
            return await self._await_answer(asked)
        began = time.monotonic()
        found = await self._await_answer(asked, block)
        self._patience.observe(time.monotonic() - began)
        return found

    async def _await_answer(
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
        patience = self._patience
        limit_s = math.inf if block is None else patience.limit_s
        try:
            return await await_answer(
                self._target, reference, silent_s=patience.silent_s, block=block, limit_s=limit_s
            )
        except BlockOverdue:
            hangs = DrafterHangs(f"The drafter has not answered within {limit_s:g} s.")
            raise self._blaming_drafter(hangs) from None
        except EngineSilent:
            raise blaming(self._target, TargetHangs("The target is silent.")) from None
        except Exception as error:
            raise self._classify(error) from None

    def _classify(self, error: Exception) -> RapidError:
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
            return blaming(drafter, failure.as_rapid_error("drafter", DrafterUnavailable))
        if isinstance(failure.cause, GrammarTooComplex):  # of target or drafter: the choice ends
            return failure.cause
        if isinstance(failure.cause, BadRequest):  # a malformed block is not the client's error
            return EngineFailed(f"The drafter's block cannot be judged: {failure.cause}")
        if isinstance(failure.cause, DrafterUnavailable):
            return self._blaming_drafter(failure.cause)
        return blaming(self._target, failure.as_rapid_error("target", TargetUnavailable))

    def _blaming_drafter(self, error: RapidError) -> RapidError:
        drafter = self._drafter()
        return error if drafter is None else blaming(drafter, error)


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
        self._eos_ids = request.terms.sampling.ends(eos_ids)
        self._log_odds = request.log_odds[choice] if request.log_odds else 0.0

    async def verify(self, block: ObjectRef | DraftBlock) -> Verdict:
        """Judge a block in this process, then commit the verdict on the target's engine."""
        engine, witness = self._target.engine, self._witness()
        leases = [self._target, witness] if witness else [self._target]
        scored: list[TargetLogits] = await asyncio.gather(
            *(
                self._time(engine.score.remote(lease.lease_id, self._choice, block), block)
                for lease in leases
            )
        )
        drafted = block if isinstance(block, DraftBlock) else await self._await_answer(block)
        verdict = await asyncio.to_thread(self._judge, drafted, *scored)
        commits = [engine.commit.remote(lease.lease_id, verdict) for lease in leases]
        await asyncio.gather(*map(self._await_answer, commits))
        self._log_odds = verdict.log_odds
        return verdict

    def _judge(
        self, block: DraftBlock, scored: TargetLogits, witness: TargetLogits | None = None
    ) -> Verdict:
        import torch

        from rapid.speculation.acceptance import judge
        from rapid.speculation.draw import Draw

        terms = self._request.terms
        draw = Draw(terms.sampling, terms.speculation, block.choice, block.position)
        logits, told = (  # Ray's arrays are read-only
            None if each is None else torch.from_numpy(each.logits.copy())
            for each in (scored, witness)
        )
        assert logits is not None
        explains = terms.explains_at(block.position)
        judgement = judge(
            block, logits, draw, self._eos_ids, terms.num_logprobs, self._log_odds, told,
            explains=explains,
        )  # fmt: skip
        return judgement.verdict(block, scored.verify_ms)
