"""One model serving many sequences: leases in front, one compute thread behind.

An asyncio program calls the methods; the model runs on the engine's own thread, which repeats
`Engine.step`: schedule, run, postprocess, publish. A forward is never waited for by anything but
its own callers: releasing, renewing and asking for the status take effect at once.

Ownership. `_guard` protects the ledger, the scheduler and the inbox. Sequences and the KV tensors
belong to the compute thread alone. Pages may be freed and handed out while a forward still writes
into them: their next holder's rows are computed by the same thread, later. So are copies between
pages and host memory made: between forwards, in the order in which leases came and went, and before
the rows of any lease that came meanwhile (`Engine._schedule`).
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
    """Leases, prefill, drafts, verification and plain decoding over one loaded model.

    Several engines may share a `LoadedModel`; one engine may hold the leases of a drafter and of a
    target alike. Calls name their lease; calls on one choice follow each other.
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
            loaded: from `rapid.engines.forward.loading.load_model`.
            config: room and budgets.
            vocab_size: ids shared with the other model; None takes this model's own.
            clock: monotonic seconds, for the time-to-live of leases.

        Raises:
            ConfigurationError: the KV pool cannot hold one sequence.
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
        self._ahead: dict[Sequence, DraftAhead] = {}  # nobody waits for these
        self._ahead_hits = self._ahead_misses = 0
        self._endings: dict[Lease, list[Reply]] = {}
        self._is_closed = False
        self._guard = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="rapid-engine", daemon=True)
        self._thread.start()

    # --- leases ---------------------------------------------------------------------------------

    async def open(self, request: LeaseRequest) -> None:
        """Reserve all pages the request can ever need, waiting in line for them if need be.

        Cancelling leaves the line.

        Raises:
            PromptTooLong: it can never fit.
            BadRequest: the request is malformed.
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
        """Keep a lease that is not being stepped.

        Raises:
            LeaseNotFound: it is gone.
        """
        with self._guard:
            self._ledger.touch(self._ledger.get(lease_id))

    def release(self, lease_id: str) -> None:
        """Give back a lease: its calls fail, its pages are free at once. Twice is fine."""
        with self._guard:
            try:
                lease = self._ledger.get(lease_id)
            except LeaseNotFound:
                return
            self._end(lease, "released")

    def forgo_companion(self, lease_id: str) -> None:
        """Keep no room for a second lease beside this one: none will come. Gone is fine."""
        with self._guard:
            self._ledger.forgo_companion(lease_id)

    async def wait_closed(self, lease_id: str) -> Ending:
        """Wait for the end of a lease and tell how it came.

        Raises:
            LeaseNotFound: it is not open.
            EngineFailed: nor is the engine.
        """
        reply = Reply()
        with self._guard:
            self.check_running()
            lease = self._ledger.get(lease_id)
            self._endings.setdefault(lease, []).append(reply)
        return cast(Ending, await reply.future)

    def status(self) -> EngineStatus:
        """The ledger's numbers."""
        with self._guard:
            self._expire()
            return replace(
                self._ledger.status(),
                ahead_hits=self._ahead_hits,
                ahead_misses=self._ahead_misses,
            )

    def check_integrity(self) -> None:
        """Raise unless every page and lease is accounted for."""
        with self._guard:
            self._ledger.check_integrity()

    # --- calls on a lease -------------------------------------------------------------------------

    async def prefill(self, lease_id: str) -> PrefillReceipt:
        """Have the prompt, and what was committed elsewhere, in place for all choices.

        Pages of the prompt that are here from another one are not computed again.
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
        """Commit what `verdict` says, then draft up to `num_tokens` after it.

        A shorter block comes at an end-of-sequence token and where the lease's room ends.
        """
        eos_ids = self._eos_ids
        return await self._call(
            lease_id, lambda lease: Draft(lease, choice, verdict, num_tokens, eos_ids), DraftBlock
        )

    async def draft_in_window(
        self, lease_id: str, choice: int, window: WindowDrafting, num_tokens: int
    ) -> DraftBlock:
        """Draft up to `num_tokens` on a part of the KV; leaves the lease's sequence as it is.

        The block is for the same lease to `verify`. It ends as in `draft`.

        Raises:
            ConfigurationError: the engine is deterministic.
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
        """Judge a block in one forward and commit the outcome here."""
        eos_ids, num_ids = self._eos_ids, self._vocab_size
        return await self._call(
            lease_id, lambda lease: Verify(lease, choice, block, num_ids, eos_ids), Verdict
        )

    async def score(self, lease_id: str, choice: int, block: DraftBlock) -> TargetLogits:
        """The logits a block would be judged with; nothing is committed (see `commit`)."""
        num_ids = self._vocab_size
        return await self._call(
            lease_id, lambda lease: Score(lease, choice, block, num_ids), TargetLogits
        )

    async def commit(self, lease_id: str, verdict: Verdict) -> None:
        """Append the tokens of a verdict reached elsewhere."""
        await self._call(lease_id, lambda lease: Commit(lease, verdict), object)

    async def decode(self, lease_id: str, choice: int, num_tokens: int) -> Verdict:
        """Commit up to `num_tokens` tokens of the model's own distribution; stops at their end."""
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
        with _COUNTING_THREADS:  # a thread takes the count that anyone set last when it first asks
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
        """`step`; a bug in it ends all leases instead of leaving their callers waiting."""
        try:
            return self.step()
        except Exception as error:
            self._fail([*self._replies, *self._ahead.values()], error)
            return True

    def step(self) -> bool:
        """One forward for everything that can use one; False when there was nothing to do."""
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
        """Begin what has arrived and choose the rows of the next forward."""
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
        """Copy pages between the tiers."""
        if self._host is None or not moves:
            return
        try:
            self._host.make(moves, self._cache, self._ledger.prefixes.tags, self._now)
        except Exception:
            with self._guard:
                self._host.forget()
            raise

    def _run(self, scheduled: Scheduled) -> list[torch.Tensor]:
        """One forward; one of prompts alone is timed for the host tier, which competes with it."""
        feeds = [feed for _, feed in scheduled]
        if self._host is None or not all(work.kind == "prefill" for work, _ in scheduled):
            return self._runner.run(feeds)
        num_rows = sum(len(feed.token_ids) for feed in feeds)
        began = self._now()
        logits = self._runner.run(feeds)
        self._host.pace.observe_computed(num_rows / self._config.page_tokens, self._now() - began)
        return logits

    def _now(self) -> float:
        """Seconds, when all that was launched is done."""
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
        """Hand out the logits."""
        for work, rows in zip(works, logits, strict=True):
            is_ahead = isinstance(work, DraftAhead) and self._ahead.get(work.sequence) is work
            if work not in self._replies and not is_ahead:
                continue  # dropped or released during the forward
            try:
                work.take(rows)
            except Exception as error:
                self._fail([work], error)

    def _publish(self, works: list[Work]) -> None:
        """Share what was computed, cancelled or not, and answer the callers of finished work."""
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
        """A forward raised: the KV of its leases is in doubt, so they end; the engine goes on."""
        logger.error("forward pass failed", exc_info=cause)
        with self._guard:
            for work in works:
                if self._ledger.is_open(work.lease):
                    error = EngineFailed(f"a forward pass raised {cause!r}: the lease is gone")
                    error.__cause__ = cause
                    self._end(work.lease, "failed", error)

    def _give_up(self, cause: Exception) -> None:
        """Ending leases raised as well: nothing here can be relied on, but everyone is answered."""
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
        if reply is not None:  # first, whatever comes of the rest
            reply.settle(work.result, error)
        self._forget(work)
        if reply is not None and error is None and isinstance(work, Draft) and work.is_done:
            self._go_ahead(work)

    def _go_ahead(self, draft: Draft) -> None:
        """Draft on behind a block that was handed out.

        Not for a lease beside its target's: this engine is what it waits for.
        """
        self._ahead_hits += draft.is_hit is True
        self._ahead_misses += draft.is_hit is False
        if self._config.draft_ahead and draft.lease.request.beside is None:
            ahead = draft.ahead(self._scheduler.costs.base_s.value)
            if ahead is not None:
                self._ahead[draft.sequence] = ahead
                self._scheduler.add(ahead)

    def _stop_ahead(self, sequences: Iterable[Sequence]) -> None:
        """Draft no further; what is there stays until the next call on the sequence."""
        for sequence in sequences:
            ahead = self._ahead.pop(sequence, None)
            if ahead is not None:
                self._scheduler.drop(ahead)

    def _forget(self, work: Work) -> None:
        """Drop work without an answer; its sequence keeps what was committed."""
        if self._replies.pop(work, None) is None:
            return
        self._scheduler.drop(work)
        if work in self._inbox:
            self._inbox.remove(work)
        work.lease.busy.difference_update(work.choices)
        self._ledger.touch(work.lease)

    def _end(self, lease: Lease, ending: Ending, error: Exception | None = None) -> None:
        """Close a lease: answer its calls, free its pages, tell who waits for its end."""
        for work in [work for work in self._replies if work.lease is lease]:
            self._settle(work, error or LeaseNotFound(f"lease {lease.lease_id!r} was {ending}"))
        for reply in self._endings.pop(lease, []):
            reply.settle(ending)
        self._stop_ahead(lease.sequences)
        self._ledger.release(lease.lease_id)
        self._wake()

    def _is_due(self) -> bool:
        """Whether the compute thread has something to begin with."""
        return bool(self._inbox) or self._ledger.prefixes.has_moves

    def _wake(self) -> None:
        """Leases came or went: what has to be copied for it is copied now if the thread rests."""
        if self._is_due():
            self._guard.notify()

    def _expire(self) -> None:
        for lease in self._ledger.expired():
            self._end(lease, "expired")

    def check_running(self) -> None:
        """Raise EngineFailed once the engine is closed, by `close` or by a failure of its own."""
        if self._is_closed:
            raise EngineFailed("the engine is closed")

    def close(self) -> None:
        """End all leases and the thread; a running forward is waited for."""
        with self._guard:
            self._is_closed = True
            self._ledger.close()
            for lease in self._ledger.leases():
                self._end(lease, "closed", EngineFailed("the engine is closed"))
            self._guard.notify()
        self._thread.join()
