"""The compute thread, which alone touches the model, the KV tensors and the sequences.

It repeats `ComputeThread.step`: schedule, run, postprocess, publish.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TypeAlias

import torch

from rapid.config import EngineConfig
from rapid.engines.execution.draft_chain import Answers, ComputedForward, count_forwards, run_chain
from rapid.engines.execution.failures import is_of_the_device
from rapid.engines.execution.scheduling import Scheduled
from rapid.engines.execution.state import EngineState
from rapid.engines.execution.watchdog import Watchdog
from rapid.engines.forward.runner import Runner
from rapid.engines.kv.cache import as_runs
from rapid.engines.kv.passages import PassageCache
from rapid.engines.kv.rings import KeptWindows
from rapid.engines.kv.tiers.host_tier import HostTier, Move
from rapid.engines.work.base import Work
from rapid.errors import BadRequest, EngineFailed, GrammarTooComplex, RapidError
from rapid.speculation.fast.step import answer_questions
from rapid.speculation.questions import Answer, Question

logger = logging.getLogger(__name__)

Computed: TypeAlias = list[tuple[Work, torch.Tensor]]
"""Work with the wanted logits of its rows [num_wanted, vocab]."""

_COUNTING_THREADS = threading.Lock()
_MOST_FAILED = 5  # steps in a row; a request that no engine can compute is given up after three
_LEAST_LIMIT_S = 10.0  # that a step may take, however short it was expected to be
_TIMES_EXPECTED = 10.0  # a step may take so many times what such steps took
_LOOK_S = 1e-3  # between two looks at copies that have not landed, with nothing else to do

_UNKNOWN_LIMIT_S = 600.0  # for a step of unknown cost: kernels compile, a CPU reads a whole chunk


class ComputeThread:
    """Thread that runs the calls of an `EngineState` in forwards over one KV pool."""

    def __init__(
        self,
        state: EngineState,
        runner: Runner,
        host: HostTier | None,
        config: EngineConfig,
        *,
        is_watched: bool = True,
        kept: KeptWindows | None = None,
        passages: PassageCache | None = None,
    ) -> None:
        """Make the thread, which does not run before `start`, and its watchdog if `is_watched`."""
        self.runner = runner
        self.host = host
        self.kept = kept
        self.passages = passages
        self._state = state
        self._config = config
        self._num_failed = 0  # steps since the last good one
        self.num_turns = 0  # turns of the loop that ran a step or had nothing to do
        self.limit_s = _UNKNOWN_LIMIT_S  # for the turn in progress; then the engine is closed
        self.is_stuck = False  # whether the thread was left behind in a step that does not end
        self._watchdog = Watchdog(self, self._close_stuck) if is_watched else None
        self._thread = threading.Thread(target=self._loop, name="rapid-engine", daemon=True)

    def start(self) -> None:
        """Start the thread, and another one that watches it where that is wanted."""
        self._thread.start()
        if self._watchdog is not None:
            self._watchdog.start()

    def join(self) -> None:
        """Wait until the thread has ended, once the state is closed, unless it is stuck."""
        while self._thread.is_alive() and not self.is_stuck:
            self._thread.join(timeout=1.0)
        if self._watchdog is not None:
            self._watchdog.stop()

    def _loop(self) -> None:
        with _COUNTING_THREADS:  # a thread adopts the latest count set anywhere at its first query
            if self._config.threads is not None:
                torch.set_num_threads(self._config.threads)
            torch.get_num_threads()
        try:
            while not self._state.is_closed:
                if self._step_or_fail():
                    self.num_turns += 1
                    continue
                with self._state.guard:
                    # The disk tier itself gives up a disk that does not answer.
                    is_reading = self._state.ledger.prefixes.is_reading
                    self.num_turns += is_reading or not self._state.in_progress()
                    if not (self._state.is_due() or self._state.is_closed):
                        ttl_s, rest_s = self._config.lease_ttl_s, self._state.scheduler.rest_s
                        copying_s = _LOOK_S if self._state.ledger.prefixes.is_copying else 1.0
                        self._state.guard.wait(timeout=min(copying_s, ttl_s / 4, rest_s))
        except Exception as error:
            self._close(error, "its bookkeeping failed")

    def _step_or_fail(self) -> bool:
        """Call `step`; if it raises, fail the leases at work so that their callers do not hang."""
        try:
            return self.step()
        except Exception as error:
            self._fail(self._state.in_progress(), error)
            return True

    def step(self) -> bool:
        """Run one forward over all work that is ready; return False if there was none."""
        self.limit_s = _UNKNOWN_LIMIT_S
        scheduled = self._schedule()
        expected_s = self._state.scheduler.estimate_s(scheduled)
        if expected_s is not None:
            self.limit_s = max(_LEAST_LIMIT_S, _TIMES_EXPECTED * expected_s)
        if not scheduled:
            return False
        works = list(dict.fromkeys(work for work, _ in scheduled))
        began = time.perf_counter()
        try:
            forwards = self._compute(scheduled)
        except Exception as error:
            self._fail(works, error)
            return True
        self._use(forwards)
        taken_s = self._now() - began
        for forward in forwards:
            self._state.scheduler.observe(taken_s / len(forwards), forward.scheduled)
            with self._state.guard:
                self._state.scheduler.charge(taken_s / len(forwards), forward.scheduled)
        for work in works:
            if work.times is not None:
                work.times.num_steps += sum(work in forward.works for forward in forwards)
                work.times.computed_s += taken_s
        self._publish(works)
        return True

    def _compute(self, scheduled: Scheduled) -> list[ComputedForward]:
        """Run one forward, or several that draft without the host between them."""
        most = count_forwards(scheduled)
        works = {work for work, _ in scheduled}
        if most == 1 or self._is_interrupted(works):
            return [ComputedForward(scheduled, self._run(scheduled))]
        self.limit_s = min(most * self.limit_s, _UNKNOWN_LIMIT_S)
        return run_chain(scheduled, most, self._run, lambda: self._is_interrupted(works))

    def _is_interrupted(self, works: set[Work]) -> bool:
        """Return whether another call waits, or one of these was dropped: its pages are free."""
        with self._state.guard:
            return not (self._state.is_quiet() and all(map(self._state.is_wanted, works)))

    def _use(self, forwards: list[ComputedForward]) -> None:
        """Use what forwards that followed each other have drawn, as if each were a step."""
        going = forwards[0].works
        for number, forward in enumerate(forwards):
            left = [
                (work, rows)
                for (work, _), rows in zip(forward.scheduled, forward.logits, strict=True)
                if work in going
            ]
            if number:
                for work, _ in left:
                    work.feeds(1)  # the row was computed already; it is counted now
            self._postprocess(left, forward.answers)
            going = {
                work
                for work, _ in left
                if self._state.is_wanted(work) and not work.is_done and forward.is_fed_right(work)
            }
            if not going:
                return

    def _schedule(self) -> Scheduled:
        """Begin the work that has arrived and select the rows of the next forward."""
        with self._state.guard:
            self._state.expire()
            moves = self._state.ledger.prefixes.take_moves()
        landed = self._move(moves)
        self._erase(landed)
        with self._state.guard:
            for work in self._state.arrivals():
                if self._state.is_wanted(work):
                    self._begin(work)
            for work in self._state.scheduler.waiting():
                work.advance()
                if work.is_done:
                    self._state.settle(work)
            return self._state.scheduler.select()

    def _erase(self, landed: list[Move]) -> None:
        """Mark copies as landed, and go on to forget documents: drop pages, and overwrite them."""
        ledger = self._state.ledger
        prefixes = ledger.prefixes
        with self._state.guard:
            prefixes.settle(landed)
            erasing = list(self._state.erasing)
            if not (erasing or prefixes.is_dirty):
                return
            for each in erasing:
                is_new, copied = not each.found, self.host.pages_copied if self.host else set()
                if is_new:
                    each.found = prefixes.forget(each.documents)
                    each.had_readers = ledger.has_readers(each.documents)
                each.awaited = copied if is_new else each.awaited & copied
            pages, host_pages = prefixes.take_dirty()
            stale, rings = ledger.take_stale(), ledger.take_stale_rings()
        if stale and self.passages is not None:
            self.passages.num_overwritten += 1
        for each in erasing:
            if self.passages is not None:
                found = self.passages.forget(each.documents)
                each.found["passages"] = each.found.get("passages", 0) + found
            if self.kept is not None:
                each.found["memory"] += self.kept.forget(each.documents)
        cache, size = self.runner.cache, self._config.page_tokens
        num_slots = ledger.pool.num_pages * size  # and those behind them, of padding
        spans = [(run.start * size, run.stop * size) for run in as_runs(pages)]
        cache.zero([*spans, *stale, (num_slots, cache.num_slots)])
        if rings:
            cache.zero(rings, of_rings=True)
        if self.host is not None and host_pages:
            self.host.zero(host_pages)
        with self._state.guard:
            if prefixes.is_dirty:
                return  # the rest comes after the next step
            for each in erasing:
                if not each.awaited:
                    self._state.erasing.remove(each)
                    each.reply.settle(each)

    def _move(self, moves: list[Move]) -> list[Move]:
        """Launch copies between the KV pool and host memory; return those that have landed.

        Pages may be freed and handed out while a forward still writes into them, because this
        thread launches the copies, and computes their next holder's rows, between forwards.
        """
        if self.host is None or not (moves or self.host.is_copying):
            return []
        began = time.perf_counter()
        try:
            self.host.launch(moves, self.runner.cache, self._state.ledger.prefixes.tags)
            landed = self.host.take_landed()
        except Exception:
            with self._state.guard:
                self.host.forget()
            raise
        ended = time.perf_counter()
        with self._state.guard:
            for work in self._state.in_progress():
                if work.times is not None:
                    work.times.copied_s += ended - max(began, work.times.since)
        return landed

    def _run(self, scheduled: Scheduled) -> list[torch.Tensor]:
        """Run one forward; return each work's wanted logits [num_wanted, vocab]."""
        for work in dict.fromkeys(work for work, _ in scheduled):
            work.prepare()
        feeds = [feed for _, feed in scheduled]
        for feed in feeds:
            if feed.ring is not None:
                feed.ring.write(feed.position, feed.position + len(feed.token_ids))
        if self.host is None or not all(work.kind == "prefill" for work, _ in scheduled):
            return self.runner.run(feeds)
        # Timed, to compare restoring from host memory with it.
        num_rows = sum(len(feed.token_ids) for feed in feeds)
        began = self._now()
        logits = self.runner.run(feeds)
        self.host.pace.observe_computed(num_rows / self._config.page_tokens, self._now() - began)
        return logits

    def _now(self) -> float:
        """Return the time in seconds after all work launched on the device is done."""
        if self.runner.device.type == "cuda":
            torch.cuda.current_stream(self.runner.device).synchronize()
        return time.perf_counter()

    def _begin(self, work: Work) -> None:
        for lease in work.leases:
            self._state.ledger.touch(lease)
            self._state.stop_ahead(lease.sequences[choice] for choice in work.choices)
        try:
            work.begin()
        except RapidError as error:
            self._state.settle(work, error)
            return
        except Exception as error:
            self._end([work], error)
            return
        if work.is_done:
            self._state.settle(work)
        else:
            self._state.scheduler.add(work)

    def _postprocess(self, computed: Computed, known: Answers | None) -> None:
        """Hand each work that was not dropped its logits, and what is or was drawn from them."""
        causes: dict[Work, Exception] = {}
        asking: list[Work] = []
        questions: list[Question] = []
        for work, rows in computed:
            if work in causes or not self._state.is_wanted(work):
                continue  # dropped or released during the forward
            try:
                question = work.take(rows)
            except Exception as error:
                self._end([work], error)
                causes[work] = error
                continue
            if question is not None:
                asking.append(work)
                questions.append(question)
        answers = [known[work] for work in asking] if known else self._answers(questions)
        self._state.scheduler.count_drawn(answers)
        for work, answer in zip(asking, answers, strict=True):
            try:
                if isinstance(answer, Exception):
                    raise answer
                work.use(answer)
            except Exception as error:
                self._end([work], error)
                causes[work] = error
        failures = {w: why for w, why in causes.items() if not isinstance(why, BadRequest)}
        if any(work not in failures for work, _ in computed):  # else all fail on their own
            self._num_failed = 0
        else:
            self._count(next(iter(failures.values())))

    def _answers(self, questions: list[Question]) -> Sequence[Answer | Exception]:
        """Return what is drawn from the logits of a step; on failure the cause, for each."""
        try:
            return answer_questions(questions)
        except Exception as error:
            return [error] * len(questions)

    def _publish(self, works: list[Work]) -> None:
        """Share what was computed, even for cancelled work, and answer finished work's callers."""
        with self._state.guard:
            for work in works:
                if self._state.ledger.is_open(work.lease):
                    work.share()
                if work.is_done:
                    self._state.settle(work)

    def _fail(self, works: list[Work], cause: Exception) -> None:
        """End the leases of a step that failed, and count it."""
        self._end(works, cause)
        self._count(cause)

    def _end(self, works: list[Work], cause: Exception) -> None:
        """End the leases of failed work, whose KV may be corrupt; the engine goes on if it can.

        Where a grammar has become too complex nothing is corrupt, and the other choices go on.
        """
        if isinstance(cause, GrammarTooComplex):
            with self._state.guard:
                for work in filter(self._state.is_wanted, works):
                    self._state.settle(work, cause)
            return
        leases = {lease.lease_id: lease for work in works for lease in work.leases}
        error: RapidError
        if isinstance(cause, BadRequest):  # such as a registered rule that fails: the fault of one
            error = cause
        else:
            told = ", ".join(sorted(leases))
            tenants = ", ".join(sorted({one.request.terms.tenant for one in leases.values()}))
            about = {"tenant": tenants}
            logger.error("a step failed; its leases end: %s", told, exc_info=cause, extra=about)
            error = EngineFailed("The engine failed at a step; its log says why.")
            error.__cause__ = cause
        with self._state.guard:
            for lease in leases.values():
                if self._state.ledger.is_open(lease):
                    self._state.end(lease, "failed", error)
        if is_of_the_device(cause):
            self._close(cause, "its device failed")

    def _count(self, cause: Exception) -> None:
        """Count a failed step; several in a row are the engine's own failure."""
        self._num_failed += 1
        if self._num_failed >= _MOST_FAILED:
            self._close(cause, f"{self._num_failed} steps failed in a row")

    def _close_stuck(self) -> None:
        """Close the engine on the watchdog's thread, as this one does not go on."""
        self.is_stuck = True
        self._close(None, "a step does not end")

    def close_lost(self, why: str) -> None:
        """Close the engine, on any thread, as another process of its model is lost."""
        self.is_stuck = True  # the compute thread may wait for that process
        self._close(None, why)

    def _close(self, cause: Exception | None, why: str) -> None:
        """Close the engine, and answer every pending caller."""
        logger.critical("the engine is closed: %s", why, exc_info=cause)
        error = EngineFailed(f"The engine is closed: {why}.")
        error.__cause__ = cause
        with self._state.guard:
            self._state.abandon(error)
