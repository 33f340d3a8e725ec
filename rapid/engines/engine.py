"""The engine: one model that serves many sequences from one compute thread.

An asyncio program calls the methods of `Engine`; the model runs on the engine's own thread, which
repeats `Engine.step`: schedule, run, postprocess, publish. Only the callers of a forward wait for
it: releasing and renewing leases and reading the status take effect at once.

Ownership: `_guard` protects the ledger, the scheduler and the inbox. Sequences and the KV tensors
belong to the compute thread alone. Pages may be freed and handed out while a forward still writes
into them, because the same thread computes their next holder's rows later. That thread also copies
pages to and from host memory: between forwards, in the order in which leases opened and ended, and
before the rows of any lease opened meanwhile (`Engine._schedule`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, TypeVar, cast

import torch

from rapid.config import EngineConfig, WindowDrafting
from rapid.engines.forward.cuda_graphs import GraphCapture
from rapid.engines.forward.kernels import kernels_of
from rapid.engines.forward.loading import LoadedModel, plan_kv_pages
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.tiles import TiledRunner
from rapid.engines.kv.cache import KVCache, PagePool
from rapid.engines.kv.host_tier import HostTier, Move
from rapid.engines.kv.leases import Lease, LeaseLedger
from rapid.engines.kv.sequences import Sequence
from rapid.engines.replies import Reply
from rapid.engines.scheduling import Scheduled, Scheduler
from rapid.engines.work.base import Commit, Work
from rapid.engines.work.drafting import Decode, Draft, DraftAhead
from rapid.engines.work.prefill import Prefill
from rapid.engines.work.verifying import Score, Verify
from rapid.engines.work.window_drafting import WindowDraft
from rapid.errors import (
    BadRequest,
    ConfigurationError,
    EngineFailed,
    LeaseNotFound,
    OutOfStep,
    RapidError,
)
from rapid.messages import (
    DraftBlock,
    EngineStatus,
    LeaseRequest,
    PrefillReceipt,
    TargetLogits,
    Verdict,
)
from rapid.ports import Clock

logger = logging.getLogger(__name__)

_COUNTING_THREADS = threading.Lock()

Result = TypeVar("Result")
Ending = Literal["released", "expired", "failed", "closed"]


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
    ) -> None:
        """Allocate the KV pool and start the compute thread.

        Args:
            loaded: The model, as `rapid.engines.forward.loading.load_model` returns it.
            config: Capacity and budgets.
            vocab_size: Number of token ids shared with the other model; None uses this model's.
            clock: Monotonic clock in seconds, for the time-to-live of leases.

        Raises:
            ConfigurationError: The KV pool cannot hold one sequence.
        """
        max_context, num_pages = plan_kv_pages(loaded, config)
        self._vocab_size = min(vocab_size or loaded.vocab_size, loaded.vocab_size)
        self._num_rows = loaded.embedding_rows
        self._eos_ids = loaded.eos_ids
        self._device = loaded.device
        self._config = config
        self._cache = KVCache(
            loaded.kv_layout, num_pages + config.deterministic, config.page_tokens
        )
        kernels = kernels_of(loaded, self._cache, max_context, config)
        runner = TiledRunner if config.deterministic else Runner
        self._runner = runner(loaded.model, self._cache, loaded.device, self._vocab_size, kernels)
        if len(set(loaded.kv_layout.devices)) == 1:
            self._runner.capture_steps(max_context, GraphCapture())
        num_host_pages = config.host_cache_tokens // config.page_tokens
        self._host = (
            HostTier(loaded.kv_layout, num_host_pages, config.page_tokens)
            if num_host_pages
            else None
        )
        self._ledger = LeaseLedger(
            PagePool(num_pages),
            config.page_tokens,
            config.max_leases,
            max_context,
            config.lease_ttl_s,
            clock,
            self._host,
        )
        self._scheduler = Scheduler(config.step_tokens, config.prefill_slowdown)
        self._inbox: list[Work] = []
        self._replies: dict[Work, Reply] = {}
        self._ahead: dict[Sequence, DraftAhead] = {}  # these have no caller
        self._ahead_hits = self._ahead_misses = 0
        self._endings: dict[Lease, list[Reply]] = {}
        self._is_closed = False
        self._guard = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="rapid-engine", daemon=True)
        self._thread.start()

    # --- leases ---------------------------------------------------------------------------------

    async def open(self, request: LeaseRequest) -> None:
        """Open a lease with all pages the request can ever need, queueing until there is room.

        Cancelling the call leaves the queue.

        Raises:
            PromptTooLong: The request can never fit.
            BadRequest: The request is malformed.
            OutOfStep: The lease id is taken.
            LeaseNotFound: The lease named by `request.beside` is not open.
            EngineFailed: The engine is closed.
        """
        for token_ids in (request.prompt_ids.tolist(), *request.committed):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._num_rows:
                raise BadRequest("the prompt holds a token id beyond the vocabulary", "messages")
        reply = Reply()

        def answer(lease: Lease | None) -> None:
            reply.settle(None, None if lease else EngineFailed("the engine is closed"))

        waiter = self._ledger.prepare(request, answer)
        with self._guard:
            self.check_running()
            self._ledger.submit(waiter)
            self._wake()
        try:
            await reply.future
        except asyncio.CancelledError:
            with self._guard:
                if not self._ledger.withdraw(waiter):
                    self.release(request.lease_id)
                self._wake()
            raise

    def renew(self, lease_id: str) -> None:
        """Restart the time-to-live of a lease.

        Raises:
            LeaseNotFound: The lease is not open.
        """
        with self._guard:
            self._ledger.touch(self._ledger.get(lease_id))

    def release(self, lease_id: str) -> None:
        """End a lease: fail its calls and free its pages at once. No-op if it is not open."""
        with self._guard:
            try:
                lease = self._ledger.get(lease_id)
            except LeaseNotFound:
                return
            self._end(lease, "released")

    def forgo_companion(self, lease_id: str) -> None:
        """Give back the room kept for a companion of this lease. No-op if it is not open."""
        with self._guard:
            self._ledger.forgo_companion(lease_id)

    async def wait_closed(self, lease_id: str) -> Ending:
        """Wait until a lease ends and return how it ended.

        Raises:
            LeaseNotFound: The lease is not open.
            EngineFailed: The engine is closed.
        """
        reply = Reply()
        with self._guard:
            self.check_running()
            lease = self._ledger.get(lease_id)
            self._endings.setdefault(lease, []).append(reply)
        return cast(Ending, await reply.future)

    def status(self) -> EngineStatus:
        """Return the counts of leases, pages and drafts ahead, after ending expired leases."""
        with self._guard:
            self._expire()
            return replace(
                self._ledger.status(),
                ahead_hits=self._ahead_hits,
                ahead_misses=self._ahead_misses,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page and lease is accounted for."""
        with self._guard:
            self._ledger.check_integrity()

    # --- calls on a lease -------------------------------------------------------------------------

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        """Compute the KV of the prompt and of tokens committed elsewhere, for all choices.

        Pages of the prompt that are cached from another prompt are not computed again.
        """
        return await self._call(
            lease_id,
            lambda lease: Prefill(
                lease, self._cache, self._ledger.prefixes, self._config.page_tokens
            ),
            PrefillReceipt,
        )

    async def draft(
        self, lease_id: str, choice: int, verdict: Verdict | None, num_tokens: int
    ) -> DraftBlock:
        """Commit the tokens of `verdict`, then draft up to `num_tokens` after them.

        The block is shorter after an end-of-sequence token, where the lease's room ends and, under
        the rule `paper`, after a token that the drafter gave a probability below 0.1.
        """
        eos_ids = self._eos_ids
        return await self._call(
            lease_id, lambda lease: Draft(lease, choice, verdict, num_tokens, eos_ids), DraftBlock
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
        eos_ids = self._eos_ids
        return await self._call(
            lease_id,
            lambda lease: WindowDraft(lease, choice, window, num_tokens, eos_ids),
            DraftBlock,
        )

    async def verify(self, lease_id: str, choice: int, block: DraftBlock) -> Verdict:
        """Judge a block in one forward and commit the outcome on this lease."""
        eos_ids, num_ids = self._eos_ids, self._vocab_size
        return await self._call(
            lease_id, lambda lease: Verify(lease, choice, block, num_ids, eos_ids), Verdict
        )

    async def score(self, lease_id: str, choice: int, block: DraftBlock) -> TargetLogits:
        """Return the target's logits of a block to judge elsewhere; nothing is committed.

        The verdict is for `commit`.
        """
        num_ids = self._vocab_size
        return await self._call(
            lease_id, lambda lease: Score(lease, choice, block, num_ids), TargetLogits
        )

    async def commit(self, lease_id: str, verdict: Verdict) -> None:
        """Commit the tokens of a verdict reached elsewhere."""
        await self._call(lease_id, lambda lease: Commit(lease, verdict), object)

    async def decode(self, lease_id: str, choice: int, num_tokens: int) -> Verdict:
        """Commit up to `num_tokens` tokens drawn from the model's own distribution.

        Decoding stops early at an end-of-sequence token and at the request's `max_tokens`.
        """
        eos_ids = self._eos_ids
        return await self._call(
            lease_id, lambda lease: Decode(lease, choice, num_tokens, eos_ids), Verdict
        )

    async def _call(
        self, lease_id: str, make: Callable[[Lease], Work], kind: type[Result]
    ) -> Result:
        reply = Reply()
        with self._guard:
            self.check_running()
            work = make(self._ledger.get(lease_id))
            if work.lease.busy.intersection(work.choices):
                raise OutOfStep(f"lease {lease_id!r} has another call in progress on this choice")
            work.lease.busy.update(work.choices)
            self._replies[work] = reply
            self._inbox.append(work)
            self._guard.notify()
        try:
            return cast(Result, await reply.future)
        except asyncio.CancelledError:
            with self._guard:
                self._forget(work)
            raise

    # --- the compute thread -----------------------------------------------------------------------

    def _loop(self) -> None:
        with _COUNTING_THREADS:  # a thread adopts the latest count set anywhere at its first query
            if self._config.threads is not None:
                torch.set_num_threads(self._config.threads)
            torch.get_num_threads()
        try:
            while not self._is_closed:
                if not self._step_or_fail():
                    with self._guard:
                        if not (self._is_due() or self._is_closed):
                            ttl_s, rest_s = self._config.lease_ttl_s, self._scheduler.rest_s
                            self._guard.wait(timeout=min(1.0, ttl_s / 4, rest_s))
        except Exception as error:
            self._give_up(error)

    def _step_or_fail(self) -> bool:
        """Call `step`; if it raises, fail the leases at work so that their callers do not hang."""
        try:
            return self.step()
        except Exception as error:
            self._fail([*self._replies, *self._ahead.values()], error)
            return True

    def step(self) -> bool:
        """Run one forward over all work that is ready; return False if there was none."""
        scheduled = self._schedule()
        if not scheduled:
            return False
        works = [work for work, _ in scheduled]
        began = time.perf_counter()
        try:
            logits = self._run(scheduled)
        except Exception as error:
            self._fail(works, error)
            return True
        self._postprocess(works, logits)
        self._scheduler.observe(self._now() - began, scheduled)
        self._publish(works)
        return True

    def _schedule(self) -> Scheduled:
        """Begin the work that has arrived and select the rows of the next forward."""
        with self._guard:
            self._expire()
            arrived, self._inbox = self._inbox, []
            moves = self._ledger.prefixes.take_moves()
        self._move(moves)
        with self._guard:
            self._ledger.prefixes.settle(moves)
            for work in arrived:
                if work in self._replies:
                    self._begin(work)
            for work in self._scheduler.waiting():
                work.advance()
                if work.is_done:
                    self._settle(work)
            return self._scheduler.select()

    def _move(self, moves: list[Move]) -> None:
        """Copy pages between the KV pool and host memory."""
        if self._host is None or not moves:
            return
        try:
            self._host.make(moves, self._cache, self._ledger.prefixes.tags, self._now)
        except Exception:
            with self._guard:
                self._host.forget()
            raise

    def _run(self, scheduled: Scheduled) -> list[torch.Tensor]:
        """Run one forward; return each work's wanted logits [num_wanted, vocab].

        A forward of prefill rows alone is timed, to compare restoring from host memory with it.
        """
        feeds = [feed for _, feed in scheduled]
        if self._host is None or not all(work.kind == "prefill" for work, _ in scheduled):
            return self._runner.run(feeds)
        num_rows = sum(len(feed.token_ids) for feed in feeds)
        began = self._now()
        logits = self._runner.run(feeds)
        self._host.pace.observe_computed(num_rows / self._config.page_tokens, self._now() - began)
        return logits

    def _now(self) -> float:
        """Return the time in seconds after all work launched on the device is done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()

    def _begin(self, work: Work) -> None:
        self._ledger.touch(work.lease)
        self._stop_ahead(work.lease.sequences[choice] for choice in work.choices)
        try:
            work.begin()
        except RapidError as error:
            self._settle(work, error=error)
            return
        except Exception as error:
            self._fail([work], error)
            return
        if work.is_done:
            self._settle(work)
        else:
            self._scheduler.add(work)

    def _postprocess(self, works: list[Work], logits: list[torch.Tensor]) -> None:
        """Hand each work its logits, unless it was dropped during the forward."""
        for work, rows in zip(works, logits, strict=True):
            is_ahead = isinstance(work, DraftAhead) and self._ahead.get(work.sequence) is work
            if work not in self._replies and not is_ahead:
                continue  # dropped or released during the forward
            try:
                work.take(rows)
            except Exception as error:
                self._fail([work], error)

    def _publish(self, works: list[Work]) -> None:
        """Share what was computed, even for cancelled work, and answer finished work's callers."""
        with self._guard:
            for work in works:
                if self._ledger.is_open(work.lease):
                    work.share()
                if not work.is_done:
                    continue
                if isinstance(work, DraftAhead):
                    self._stop_ahead([work.sequence])
                else:
                    self._settle(work)

    def _fail(self, works: list[Work], cause: Exception) -> None:
        """End the leases of failed work, whose KV may be corrupt; the engine goes on."""
        logger.error("forward pass failed", exc_info=cause)
        with self._guard:
            for work in works:
                if self._ledger.is_open(work.lease):
                    error = EngineFailed(f"a forward pass raised {cause!r}: the lease is gone")
                    error.__cause__ = cause
                    self._end(work.lease, "failed", error)

    def _give_up(self, cause: Exception) -> None:
        """Close the engine after its bookkeeping raised, and answer every pending caller."""
        logger.critical("the engine's bookkeeping failed: the engine is closed", exc_info=cause)
        error = EngineFailed(f"the engine is closed: its bookkeeping raised {cause!r}")
        error.__cause__ = cause
        with self._guard:
            self._is_closed = True
            for reply in self._replies.values():
                reply.settle(None, error)
            for reply in itertools.chain(*self._endings.values()):
                reply.settle("failed")
            self._replies.clear()
            self._endings.clear()
            self._ledger.close()

    # --- bookkeeping, always under the guard -----------------------------------------------------

    def _settle(self, work: Work, error: Exception | None = None) -> None:
        reply = self._replies.get(work)
        if reply is not None:  # first, so that the caller is answered even if the rest raises
            reply.settle(work.result, error)
        self._forget(work)
        if reply is not None and error is None and isinstance(work, Draft) and work.is_done:
            self._go_ahead(work)

    def _go_ahead(self, draft: Draft) -> None:
        """Start drafting ahead, behind a block that was handed out.

        A lease beside its target's does not draft ahead: this same engine judges its blocks.
        """
        self._ahead_hits += draft.is_hit is True
        self._ahead_misses += draft.is_hit is False
        if self._config.draft_ahead and draft.lease.request.beside is None:
            ahead = draft.ahead(self._scheduler.costs.base_s.value)
            if ahead is not None:
                self._ahead[draft.sequence] = ahead
                self._scheduler.add(ahead)

    def _stop_ahead(self, sequences: Iterable[Sequence]) -> None:
        """Stop drafting ahead; tokens already drafted stay until the sequence's next call."""
        for sequence in sequences:
            ahead = self._ahead.pop(sequence, None)
            if ahead is not None:
                self._scheduler.drop(ahead)

    def _forget(self, work: Work) -> None:
        """Drop work without answering its caller; its sequence keeps the committed tokens."""
        if self._replies.pop(work, None) is None:
            return
        self._scheduler.drop(work)
        if work in self._inbox:
            self._inbox.remove(work)
        work.lease.busy.difference_update(work.choices)
        self._ledger.touch(work.lease)

    def _end(self, lease: Lease, ending: Ending, error: Exception | None = None) -> None:
        """Close a lease: answer its calls and `wait_closed`, and free its pages."""
        for work in [work for work in self._replies if work.lease is lease]:
            self._settle(work, error or LeaseNotFound(f"lease {lease.lease_id!r} was {ending}"))
        for reply in self._endings.pop(lease, []):
            reply.settle(ending)
        self._stop_ahead(lease.sequences)
        self._ledger.release(lease.lease_id)
        self._wake()

    def _is_due(self) -> bool:
        """Return whether the compute thread has calls to begin or pages to copy."""
        return bool(self._inbox) or self._ledger.prefixes.has_moves

    def _wake(self) -> None:
        """Wake an idle compute thread for the page copies that opening or ending leases ordered."""
        if self._is_due():
            self._guard.notify()

    def _expire(self) -> None:
        for lease in self._ledger.expired():
            self._end(lease, "expired")

    def check_running(self) -> None:
        """Raise EngineFailed if the engine was closed by `close` or by a failure of its own."""
        if self._is_closed:
            raise EngineFailed("the engine is closed")

    def close(self) -> None:
        """End all leases, wait for a running forward and join the compute thread."""
        with self._guard:
            self._is_closed = True
            self._ledger.close()
            for lease in self._ledger.leases():
                self._end(lease, "closed", EngineFailed("the engine is closed"))
            self._guard.notify()
        self._thread.join()
