"""The engine: one model that serves many sequences.

Callers await `Engine`'s methods; the `ComputeThread` alone touches the model, its KV and the
sequences. They meet in the `EngineState`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Set
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np

from rapid.checkpoints.memory import plan_pages
from rapid.config import EngineConfig, WindowDrafting
from rapid.constraints.grammars import Grammars
from rapid.engine_status import EngineStatus, Erasure, LeaseUsage
from rapid.engines.execution.compute import ComputeThread
from rapid.engines.execution.replies import Reply
from rapid.engines.execution.scheduling import Scheduler
from rapid.engines.execution.state import Ending, EngineState, Erasing
from rapid.engines.execution.work_spans import trace_work
from rapid.engines.forward.opening import open_passages
from rapid.engines.forward.weights.loading import LoadedModel, plan_rings
from rapid.engines.kv.cache import PagePool
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.leases.lease_ledger import LeaseLedger
from rapid.engines.kv.rings import KeptWindows, RingPool
from rapid.engines.kv.tiers.lower_tiers import LowerTiers
from rapid.engines.parallel.leading import open_disk_tier, open_leading_runner
from rapid.engines.work.base import Commit, Work
from rapid.engines.work.drafting import Decode, Draft
from rapid.engines.work.prefill import MaskedPrefill, Prefill
from rapid.engines.work.scoring import ScoringPrefill
from rapid.engines.work.verifying import (
    Score,
    Scored,
    Verify,
    Weigh,
    Witness,
    WitnessedVerify,
)
from rapid.engines.work.window_drafting import WindowDraft
from rapid.errors import BadRequest, ConfigurationError, LeaseNotFound
from rapid.messages import (
    DraftBlock,
    LeaseRequest,
    PrefillReceipt,
    ReadSoFar,
    TargetLogits,
    Verdict,
)
from rapid.ports import Clock
from rapid.speculation.fast.step import judge_block
from rapid.speculation.questions import ToJudge

Result = TypeVar("Result")

_NAMED_AT_ONCE = 4096  # most tokens of a prompt whose pages are named on the event loop


class Engine:
    """Leases, prefill, drafting, verification and plain decoding over one loaded model.

    Several engines may share a `LoadedModel`, and one engine may hold both a drafter's and a
    target's leases. Every call names its lease; calls on one choice must not overlap.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        vocab_size: int | None = None,
        clock: Clock = time.monotonic,
        is_watched: bool = True,
    ) -> None:
        """Allocate the KV pool and start the compute thread.

        Args:
            vocab_size: Number of token ids shared with the other model; None uses this model's.
            clock: Monotonic clock in seconds, for the time-to-live of leases.
            is_watched: Whether the engine closes when a step takes far too long. It should not
                where nobody would replace it: a step of a starved process takes long, and ends.

        Raises:
            ConfigurationError: The KV pool cannot hold one sequence.
        """
        max_context, num_pages = plan_pages(config, loaded.max_context)
        self._vocab_size = min(vocab_size or loaded.vocab_size, loaded.vocab_size)
        self._num_rows = loaded.embedding_rows
        self._eos_ids = loaded.eos_ids
        self._config = config
        runner, host = open_leading_runner(loaded, config, self._vocab_size)
        self._host = host
        rings = plan_rings(loaded, config)
        self._kept = None if rings is None else KeptWindows(rings, runner.cache)
        self._passages = open_passages(loaded, config, runner)
        ledger = LeaseLedger(
            PagePool(num_pages),
            config.page_tokens,
            config.max_leases,
            max_context,
            config.lease_ttl_s,
            clock,
            host,
            disk := open_disk_tier(loaded, config, host),
            None if rings is None else RingPool(rings),
            loaded.eos_ids,
            Grammars(loaded.tokenizer, loaded.eos_ids, self._vocab_size).open,
            runner.cache.layout.num_bytes(config.page_tokens),
        )
        # On a CPU it was not measured whether waiting for others gains anything.
        joins = loaded.device.type == "cuda" and not config.deterministic
        scheduler = Scheduler(
            config.step_tokens, config.prefill_slowdown, joins=joins, spending=ledger.spending
        )
        self._state = EngineState(ledger, scheduler, draft_ahead=config.draft_ahead)
        self._compute = ComputeThread(
            self._state,
            runner,
            host,
            config,
            is_watched=is_watched,
            kept=self._kept,
            passages=self._passages,
        )
        runner.watch(self._compute.close_lost)
        self._compute.start()
        self._disk = disk
        self._tiers = LowerTiers(config.page_tokens, host, disk, self._passages)
        if disk is not None:
            disk.start(self._state.look)

    # --- leases ---------------------------------------------------------------------------------

    async def open(self, request: LeaseRequest, *, expires: bool = True) -> None:
        """Open a lease with all pages the request can ever need, queueing until there is room.

        Cancelling the call leaves the queue. `expires` says whether the lease ends when it is idle
        and unrenewed for `lease_ttl_s`; one whose holder is lost with this engine need not.

        Raises:
            PromptTooLong: The request can never fit.
            BadRequest: The request is malformed.
            ConfigurationError: The engine is deterministic, and cannot mask.
            OutOfStep: The lease id is taken.
            LeaseNotFound: The lease named by `request.beside` is not open.
            EngineFailed: The engine is closed.
        """
        for token_ids in (request.prompt_ids, *map(np.asarray, request.committed)):
            if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self._num_rows:
                raise BadRequest("the prompt holds a token id beyond the vocabulary", "messages")
        for name, token_id in request.terms.sampling.name_tokens():
            if token_id >= self._vocab_size:
                raise BadRequest(f"{name} names a token id beyond the vocabulary", name)
        if request.masks and self._config.deterministic:
            raise ConfigurationError("a deterministic engine leaves out no part of a prompt")
        if request.passages and (self._passages is None or request.scored_from is not None):
            request = replace(request, passages=())
        reply = Reply()

        def answer(opened: Lease | Exception) -> None:
            if isinstance(opened, Lease):
                opened.expires = expires
            reply.settle(None, opened if isinstance(opened, Exception) else None)

        prepare = self._state.ledger.prepare
        is_quick = request.terms.sampling.grammar is None
        if is_quick and len(request.prompt_ids) <= _NAMED_AT_ONCE:
            waiter = prepare(request, answer)
        else:  # milliseconds, in which the loop would answer nobody else
            waiter = await asyncio.to_thread(prepare, request, answer)
        with self._state.guard:
            self._state.check_running()
            self._state.ledger.submit(waiter)
            self._state.wake()
        try:
            await reply.future
        except asyncio.CancelledError:
            with self._state.guard:
                if not self._state.ledger.withdraw(waiter):
                    self.release(request.lease_id)
                self._state.wake()
            raise

    def renew(self, lease_id: str) -> None:
        """Restart the time-to-live of a lease, or raise LeaseNotFound."""
        with self._state.guard:
            self._state.ledger.touch(self._state.ledger.get(lease_id))

    def release(self, lease_id: str) -> None:
        """End a lease: fail its calls and free its pages at once. No-op if it is not open."""
        with self._state.guard:
            try:
                lease = self._state.ledger.get(lease_id)
            except LeaseNotFound:
                return
            self._state.end(lease, "released")

    def settle(self, lease_id: str) -> LeaseUsage:
        """Return what a lease used since this was last asked.

        What its tenant's earlier leases used and nobody asked for is told with it.

        Raises:
            LeaseNotFound: The lease is not open.
        """
        with self._state.guard:
            return self._state.ledger.settle(lease_id)

    def forgo_companion(self, lease_id: str) -> None:
        """Give back the room kept for a companion of this lease. No-op if it is not open."""
        with self._state.guard:
            self._state.ledger.forgo_companion(lease_id)

    async def wait_closed(self, lease_id: str) -> Ending:
        """Wait until a lease ends and return how it ended.

        Raises:
            LeaseNotFound: The lease is not open.
            EngineFailed: The engine is closed.
        """
        reply = Reply()
        with self._state.guard:
            self._state.await_ending(lease_id, reply)
        return cast(Ending, await reply.future)

    def status(self) -> EngineStatus:
        """Return the counts and measured speeds, after ending expired leases."""
        with self._state.guard:
            self._state.expire()
            costs, totals = self._state.scheduler.costs, self._state.scheduler.totals
            return replace(
                self._state.ledger.status(),
                **self._tiers.count_tokens(),
                prefill_tokens_per_s=costs.prefill_tokens_per_s,
                step_s=costs.base_s.value or 0.0,
                ahead_hits=self._state.ahead_hits,
                ahead_misses=self._state.ahead_misses,
                steps=totals.steps,
                steps_s=totals.seconds,
                step_calls=totals.calls,
                step_tokens=totals.rows,
                tokens_drawn=totals.drawn,
                tokens_specified=totals.specified,
            )

    async def forget(self, documents: Collection[str]) -> tuple[Erasure, ...]:
        """Drop the KV of all prompts that hold any of some documents, from every tier.

        What is dropped is overwritten, and so are free pages, where answers may have stood. Pages
        of open leases stay until these end, and those of waiting ones are still to come.
        `documents` are names as `Terms.documents` has them.

        Raises:
            EngineFailed: The engine is closed.
            OSError: A file cannot be removed.
        """
        reply = Reply()
        with self._state.guard:
            sizes = self._tiers.count_bytes()
            self._state.erase(documents, reply)
        erasing = cast(Erasing, await reply.future)
        found = erasing.found
        if self._disk is not None:
            removed = Reply()
            self._disk.remove(documents, removed.settle)
            found["disk"] = cast(int, await removed.future)
        cache = self._compute.runner.cache
        with self._state.guard:
            num_bytes = cache.layout.num_bytes(cache.num_slots, cache.num_ring_slots)
            ledger = self._state.ledger
            is_in_use = erasing.had_readers or ledger.has_readers(documents)
            is_in_use = is_in_use or ledger.prefixes.is_in_use(documents)
            memory = Erasure("memory", num_bytes, found["memory"], "in use" if is_in_use else None)
            return memory, *self._tiers.list_erasures(sizes, found, is_in_use=is_in_use)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page and lease is accounted for."""
        with self._state.guard:
            self._state.ledger.check_integrity()

    # --- calls on a lease -------------------------------------------------------------------------

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        """Compute the KV of the prompt and of tokens committed elsewhere, for all choices."""
        cache, ledger = self._compute.runner.cache, self._state.ledger

        def prefill(lease: Lease) -> Prefill:
            kind: type[Prefill] = MaskedPrefill if lease.request.masks else Prefill
            if lease.request.scored_from is not None:
                kind = ScoringPrefill
            pages = ledger.prefixes, ledger.page_tokens
            return kind(lease, cache, *pages, self._kept, self._passages)

        return await self._call(lease_id, prefill, PrefillReceipt)

    def read_so_far(self, lease_id: str) -> ReadSoFar:
        """Return how many tokens of a lease's prompt have been read.

        The last token of a prompt is left to the call after `prefill`, and never counted.

        Raises:
            LeaseNotFound: The lease is not open.
            EngineFailed: The engine is closed.
        """
        with self._state.guard:
            self._state.check_running()
            return self._state.ledger.get(lease_id).read_so_far

    async def draft(
        self, lease_id: str, choice: int, verdict: Verdict | None, num_tokens: int
    ) -> DraftBlock:
        """Commit the tokens of `verdict`, then draft up to `num_tokens` after them.

        The block is shorter after an end-of-sequence token, where the lease's room ends and, under
        the rule `paper`, after a token that the drafter gave a probability below 0.1.
        """
        return await self._call(
            lease_id,
            lambda lease: Draft(lease, choice, verdict, num_tokens, self._ends_of(lease)),
            DraftBlock,
        )

    async def draft_in_window(
        self, lease_id: str, choice: int, window: WindowDrafting, num_tokens: int
    ) -> DraftBlock:
        """Draft up to `num_tokens` on a part of the KV, without changing the committed sequence.

        The block is to be verified on the same lease. It is shorter after an end-of-sequence token
        and where the lease's room ends.

        Raises:
            ConfigurationError: The engine is deterministic.
        """
        if self._config.deterministic:
            raise ConfigurationError(
                "a deterministic engine does not draft in a window of its KV, where numbers depend "
                "on where a block began: leave out deterministic or WindowDrafting"
            )
        return await self._call(
            lease_id,
            lambda lease: WindowDraft(lease, choice, window, num_tokens, self._ends_of(lease)),
            DraftBlock,
        )

    async def verify(
        self,
        lease_id: str,
        choice: int,
        block: DraftBlock,
        witness: tuple[Engine, str] | None = None,
    ) -> Verdict:
        """Judge a block in one forward and commit the outcome on this lease.

        For `adaptive`, `witness` is a lease on which this model reads the retrieved text, with its
        engine. The outcome is committed there too. If the engine is this one, the rows of both
        leases are computed in one forward, and judged with those of the step's other calls.
        """
        num_ids = self._vocab_size

        def verify(lease: Lease) -> Verify:
            return Verify(lease, choice, block, num_ids, self._ends_of(lease))

        def verify_witnessed(lease: Lease, read: Lease) -> WitnessedVerify:
            return WitnessedVerify(verify(lease), Witness(read, choice, block, num_ids))

        if witness is None:
            return await self._call(lease_id, verify, Verdict)
        beside, witness_id = witness
        if beside is self:
            return await self._call(lease_id, verify_witnessed, Verdict, witness_id)
        scored, told = await asyncio.gather(
            self.weigh(lease_id, choice, block), beside.weigh(witness_id, choice, block)
        )
        question = ToJudge(
            block,
            scored.logits,
            scored.draw,
            scored.draw.sampling.ends(self._eos_ids),
            scored.num_logprobs,
            scored.log_odds,
            told.logits,
            scored.explains,
        )
        judgement = await asyncio.to_thread(judge_block, question)
        verdict = judgement.verdict(block, max(scored.verify_ms, told.verify_ms))
        await asyncio.gather(self.commit(lease_id, verdict), beside.commit(witness_id, verdict))
        return verdict

    async def weigh(self, lease_id: str, choice: int, block: DraftBlock) -> Scored:
        """Return what judging a block needs of a lease, beside another engine's reading of it."""
        num_ids = self._vocab_size
        return await self._call(
            lease_id, lambda lease: Weigh(lease, choice, block, num_ids), Scored
        )

    async def score(self, lease_id: str, choice: int, block: DraftBlock) -> TargetLogits:
        """Return the target's logits of a block to judge elsewhere; the verdict is for `commit`."""
        num_ids = self._vocab_size
        return await self._call(
            lease_id, lambda lease: Score(lease, choice, block, num_ids), TargetLogits
        )

    async def commit(self, lease_id: str, verdict: Verdict) -> None:
        """Commit the tokens of a verdict reached elsewhere."""
        await self._call(lease_id, lambda lease: Commit(lease, verdict), object)

    async def decode(self, lease_id: str, choice: int, num_tokens: int) -> Verdict:
        """Commit up to `num_tokens` of the model's own distribution, until the answer ends."""
        return await self._call(
            lease_id,
            lambda lease: Decode(lease, choice, num_tokens, self._ends_of(lease)),
            Verdict,
        )

    def _ends_of(self, lease: Lease) -> Set[int]:
        """Return the tokens that end the answers of a lease."""
        return lease.request.terms.sampling.ends(self._eos_ids)

    async def _call(
        self, lease_id: str, make: Callable[..., Work], kind: type[Result], *other_ids: str
    ) -> Result:
        """Hand in the call that `make` returns for these leases, and await its result."""
        reply = Reply()
        with self._state.guard:
            work = self._state.submit((lease_id, *other_ids), make, reply)
        try:
            if work.times is None:
                return cast(Result, await reply.future)
            with trace_work(work, work.times):
                return cast(Result, await reply.future)
        except asyncio.CancelledError:
            with self._state.guard:
                self._state.forget(work)
            raise

    def check_running(self) -> None:
        """Raise EngineFailed if the engine was closed by `close` or by a failure of its own."""
        self._state.check_running()

    async def until_closed(self) -> None:
        """Wait until the engine is closed, by `close` or by a failure of its own."""
        reply = Reply()
        with self._state.guard:
            self._state.await_closing(reply)
        await reply.future

    def close(self) -> None:
        """End all leases and wait for a running forward, unless it was found to be stuck."""
        with self._state.guard:
            self._state.close()
        self._compute.join()
        if self._disk is not None:
            self._disk.close()
        if not self._compute.is_stuck:
            if self._host is not None:
                self._host.wait()
            self._compute.runner.close()
