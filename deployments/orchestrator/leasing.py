"""The engines of one request: a lease on each, and the prefill that follows it at once."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeVar

from ray.serve.handle import DeploymentHandle

from cluster.failures import as_rapid_error
from cluster.leases import Lease, hold, hold_beside
from deployments.config.serve_config import ServeConfig
from rapid.answering.receipts import Account
from rapid.answering.resolution import answer_tokens
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import DrafterUnavailable, RapidError, TargetUnavailable
from rapid.messages import GenerateRequest, Int32Array, LeaseRequest, PrefillReceipt

Result = TypeVar("Result")
Role = Literal["target", "drafter"]
Committed = tuple[tuple[int, ...], ...]

_RENEWALS_PER_TTL = 4
_LONG_CHARACTERS = 4096
_HINTS: dict[Role, str] = {
    "target": " Shorten it, lower max_tokens, or use `mode: rag`, which reads only what retrieval "
    "finds in attached documents.",
    "drafter": " Lower rapid.retrieval_tokens or max_tokens.",
}
_HINT_OF_LOOKUP = " Shorten it or lower max_tokens."


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's part in a request.

    Attributes:
        hold: keeps the lease; closing it gives the lease back before the request ends.
    """

    lease: Lease
    prefill: asyncio.Task[PrefillReceipt]
    hold: AsyncExitStack


class Leasing:
    """Takes the leases of one request; all that is taken hangs on the caller's exit stack.

    Every lease names the request's tenant here and nowhere else.
    """

    def __init__(
        self,
        config: ServeConfig,
        handles: dict[Role, DeploymentHandle],
        request: GenerateRequest,
        sampling: SamplingConfig,
        speculation: SpeculationConfig,
        account: Account,
    ) -> None:
        self._config = config
        self._handles = handles
        self._request = request
        self._sampling = sampling
        self._speculation = speculation
        self._account = account

    def fit(self, role: Role, num_prompt: int, max_tokens: int | None) -> int:
        """How long the answer may become on this engine.

        Raises:
            PromptTooLong: by how many tokens, and what would work.
        """
        pool = self._config.target if role == "target" else self._config.drafter_pool
        looks_up = self._config.drafter == "prompt_lookup"
        return answer_tokens(
            max_tokens,
            self._config.orchestrator.default_max_tokens,
            num_prompt,
            pool.engine.max_context or pool.engine.kv_cache_tokens,
            hint=_HINT_OF_LOOKUP if looks_up else _HINTS[role],
        )

    async def take(
        self,
        held: AsyncExitStack,
        role: Role,
        prompt_ids: Int32Array,
        max_tokens: int,
        *,
        timeout_s: float,
        committed: Committed = (),
        companion_tokens: int = 0,
        first: Lease | None = None,
    ) -> Side:
        """Hold a lease until `held` is closed and begin its prefill.

        Args:
            held: what the lease hangs on.
            role: the pool to ask.
            prompt_ids: what the engine reads.
            max_tokens: longest answer.
            timeout_s: the longest wait for room.
            committed: per choice, tokens already generated on a lease that was lost.
            companion_tokens: about how long the prompt of a second lease on this engine will be.
            first: the request's lease on an engine that drafts for itself, to take this one beside.
        """
        pool = self._config.target if role == "target" else self._config.drafter_pool
        lost = self._lost(role)
        request = LeaseRequest(
            # Unique beyond the request's id: a late call must never meet another lease.
            lease_id=f"{self._request.request_id}/{role}-{secrets.token_hex(6)}",
            tenant=self._request.tenant,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=self._sampling,
            speculation=self._speculation,
            num_choices=self._request.num_choices,
            num_logprobs=self._request.num_logprobs,
            committed=committed,
            companion_tokens=companion_tokens,
            beside=first.lease_id if first else None,
            affinity=affinity_of(self._request) if role == "target" else "",
        )
        options = {
            "timeout_s": timeout_s,
            "renew_every_s": pool.engine.lease_ttl_s / _RENEWALS_PER_TTL,
        }
        if first is None:
            holding = hold(self._handles[role], request, **options, lost=lost)
        else:
            holding = hold_beside(first, request, **options, lost=lost)
        own = await held.enter_async_context(AsyncExitStack())
        lease = await own.enter_async_context(holding)
        self._account.timings_ms["queue"] += 1e3 * lease.queued_s
        return Side(lease, background(own, self._prefill(role, lease, lost)), own)

    def _lost(self, role: Role) -> type[RapidError]:
        """What the loss of an engine means, by what it does: in `rag` the drafter decides alone."""
        is_helper = role == "drafter" and self._request.speculation.mode != "rag"
        return DrafterUnavailable if is_helper else TargetUnavailable

    async def _prefill(self, role: Role, lease: Lease, lost: type[RapidError]) -> PrefillReceipt:
        started = time.monotonic()
        try:
            receipt: PrefillReceipt = await lease.engine.prefill.remote(lease.lease_id)
        except Exception as error:
            raise as_rapid_error(error, role, lost) from None
        self._account.timings_ms[f"{role}_prefill"] += 1e3 * (time.monotonic() - started)
        return receipt


def affinity_of(request: GenerateRequest) -> str:
    """The tenant's documents by their content, or a conversation by its long beginning; or nothing.

    What several requests have in common and is long enough to be worth finding read.
    """
    long = [document.text for document in request.documents]
    if not long:
        said = [message.content for message in request.messages if message.role == "user"]
        long = [text for text in said[:1] if len(text) >= _LONG_CHARACTERS]
    if not long:
        return ""
    content = "\0".join((request.tenant, *long))
    return blake2b(content.encode(), digest_size=16).hexdigest()


def background(held: AsyncExitStack, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Run `work` beside the caller until `held` is closed; its failure is told to who awaits it."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    held.callback(task.cancel)
    return task
