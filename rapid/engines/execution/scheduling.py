"""Selection of the rows that go into the next forward."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable

from rapid.engines.attention.batch import Feed
from rapid.engines.execution.joining import Joining
from rapid.engines.execution.timings import StepCosts, StepTotals
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.leases.spending import Spending
from rapid.engines.work.base import MIN_CHUNK_TOKENS, Work
from rapid.ports import Clock
from rapid.speculation.acceptance import Judgement
from rapid.speculation.questions import Decoded

Scheduled = list[tuple[Work, Feed]]

_MOST_SAVED = 3  # steps whose unused prefill time a later step may use
_MOST_RESTED_S = 0.25  # for which others' work rests at once


class Scheduler:
    """Queues of the work in progress, in order of priority.

    Verify, draft and decode rows come first, then prefill chunks, then drafting ahead.

    **Prefill** gets the rest of the token budget, but may slow the other work by no more than a
    factor. With base the measured seconds of a step without prefill, a step takes at most
    ``slowdown * base``. Where that is too little for a small chunk, the bound holds on average over
    up to four steps, and the excess of one step is taken from the next. While no other work is in
    progress, between two calls, work that returns after the time `away` finds a chunk that takes at
    most ``(slowdown - 1) * (base + away)``, and does not wait for prefill twice. While that is too
    little for a chunk, prefill rests. Tenants share prefill so that they have had equal work of the
    engine, by weight (`rapid.work_shares`); the leases of each tenant share its part equally, with
    turns at being first: neither one long prompt nor many prompts stall other work. A tenant that
    asks after a pause has credit: while that lasts, all work of others rests for its prefill, for a
    quarter of a second at once, and on average by no more than the factor.

    **Drafting ahead** takes what is left after that, in steps that do not verify or decode.

    **Verifying and decoding** may wait a moment for others that are due, where that gives tokens
    earlier (`rapid.engines.execution.joining`) and nothing else is to be computed.
    """

    def __init__(
        self,
        step_tokens: int,
        prefill_slowdown: float,
        clock: Clock = time.perf_counter,
        *,
        joins: bool = False,
        spending: Spending | None = None,
    ) -> None:
        """Start without any work; prefill may slow the other work by a factor.

        A step has at most `step_tokens` rows and, with `joins`, may wait for others that are due.
        `spending` is what leases use of the engine; None for what they use of this scheduler alone.
        """
        self._spending = spending or Spending(clock, num_pages=1, page_bytes=0)
        self._shares = self._spending.shares
        self.costs = StepCosts()
        self.totals = StepTotals()
        self._joining = Joining(clock) if joins else None
        self.rest_s = math.inf  # for which all work rests unless other work arrives
        self._step_tokens = step_tokens
        self._prefill_slowdown = prefill_slowdown
        self._clock = clock
        self._away_since: float | None = None  # the end of the last step with other rows
        self._waited_s = 0.0  # seconds of the last step if it was prefill without other rows
        self._is_on_credit = False  # whether all but tenants with credit rest in this step
        self._rested_s = 0.0  # seconds for which they did, less those that were paid back
        self._allowed_s = math.inf  # bound on the last step with prefill and other rows
        self._owed_s = 0.0  # excess of that step over its bound, at most the base
        self._spared: deque[float] = deque(maxlen=_MOST_SAVED)  # seconds of steps since a chunk
        self._steps: deque[Work] = deque()
        self._prefills: dict[str, deque[Work]] = {}  # by tenant, in the order of turns
        self._ahead: deque[Work] = deque()

    def add(self, work: Work) -> None:
        """Queue work that has begun."""
        terms = work.lease.request.terms
        self._shares.enter(terms.tenant, terms.weight)
        self._queue(work).append(work)
        if self._joining and work.kind == "step":
            self._joining.arrive(work)

    def drop(self, work: Work) -> None:
        """Remove work from its queue, whether it is done or not."""
        queue = self._queue(work)
        if work in queue:
            queue.remove(work)
            self._shares.leave(work.lease.request.terms.tenant)
        if work.kind == "prefill" and not queue:
            del self._prefills[work.lease.request.terms.tenant]
        if self._joining and work.kind == "step" and work.is_done:
            self._joining.leave(work)

    def forget(self, lease: Lease) -> None:
        """Expect no more work on a lease, which has ended."""
        if self._joining:
            self._joining.forget(lease)

    def waiting(self) -> list[Work]:
        """Return the unfinished prefills, in the order in which they began."""
        works = [work for queue in self._prefills.values() for work in queue]
        return sorted(works, key=lambda work: work.began)

    def select(self) -> Scheduled:
        """Return the work of the next forward with its rows; none while all of it rests."""
        self.rest_s = self._wait_s() or math.inf
        if self.rest_s < math.inf:
            return []
        owed = self._find_credit()
        selected = self._chunks_on_credit(owed)
        self._is_on_credit = bool(selected)
        if selected:
            return selected
        left = self._step_tokens
        for _ in range(len(self._steps)):
            if left <= 0:
                break
            work = self._steps.popleft()
            self._steps.append(work)
            for feed in work.feeds(left):
                selected.append((work, feed))
                left -= len(feed.token_ids)
        is_drafting = all(work.kind == "draft" for work, _ in selected)
        pays_back = owed and selected and len(self._spared) < _MOST_SAVED
        if not pays_back:
            for work, feed in self._chunks(max(left, MIN_CHUNK_TOKENS), is_alone=not selected):
                selected.append((work, feed))
                left -= len(feed.token_ids)
        if is_drafting:
            for work in list(self._ahead)[: max(left, 0)]:
                selected += [(work, feed) for feed in work.feeds(1)]
        if not selected:
            self._rested_s = 0.0
        return selected

    def _wait_s(self) -> float:
        """Return the seconds to wait for sequences that are due; 0 while there is other work."""
        if self._joining is None or not self._steps or self._prefills or self._ahead:
            return 0.0
        if any(work.kind != "step" for work in self._steps):
            return 0.0
        return self._joining.wait_s(len(self._steps))

    def estimate_s(self, scheduled: Scheduled) -> float | None:
        """Return the seconds that a step is expected to take; None if that is not known yet."""
        prefills = _prefills(scheduled)
        return self.costs.estimate_s(prefills, is_alone=_is_alone(scheduled))

    def observe(self, seconds: float, scheduled: Scheduled) -> None:
        """Update the measured costs with the duration of a step, in seconds."""
        num_works = len({work for work, _ in scheduled})
        self.totals.add(seconds, num_works, [feed for _, feed in scheduled])
        prefills = _prefills(scheduled)
        is_alone = _is_alone(scheduled)
        self.costs.observe(seconds, prefills, is_alone=is_alone)
        self._waited_s = seconds if prefills and is_alone else 0.0
        if self._is_on_credit:
            self._rested_s += seconds
        else:  # paid back by what prefill might have taken of this step and has not
            spared_s = self._prefill_slowdown * (self.costs.base_s.value or seconds) - seconds
            self._rested_s = max(self._rested_s - max(spared_s, 0.0), 0.0)
        if prefills:
            self._spared.clear()
            excess_s = 0.0 if is_alone else max(seconds - self._allowed_s, 0.0)
            self._owed_s = min(excess_s, self.costs.base_s.value or 0.0)
        else:
            self._spared.append(seconds)
            if self._joining and all(work.kind == "step" for work, _ in scheduled):
                self._joining.observe(seconds, num_works)
        if not is_alone:
            self._away_since = self._clock()

    def charge(self, seconds: float, scheduled: Scheduled) -> None:
        """Charge the duration of a step to its leases, with the engine's lock."""
        for (work, _), part_s in zip(scheduled, self._split(seconds, scheduled), strict=True):
            self._spending.charge(work.lease, part_s)

    def _split(self, seconds: float, scheduled: Scheduled) -> list[float]:
        """Return how much of a step's seconds is due to each of its rows, by the costs so far.

        A row of prefill has its own cost. What else a step takes is shared by the others, or by
        all rows where there are none.
        """
        rows = [len(feed.token_ids) for _, feed in scheduled]
        own = [
            num_rows * self.costs.row_s(each[1].position + num_rows // 2) * _is_prefill(each)
            for each, num_rows in zip(scheduled, rows, strict=True)
        ]
        left = max(seconds - sum(own), 0.0)
        others = [
            0 if _is_prefill(each) else num_rows
            for each, num_rows in zip(scheduled, rows, strict=True)
        ]
        if not any(own) or not any(others):
            others = rows
        parts = [cost + left * num / sum(others) for cost, num in zip(own, others, strict=True)]
        return [seconds * part / sum(parts) for part in parts]

    def count_drawn(self, answers: Iterable[object]) -> None:
        """Count the tokens of a step's answers, and those that the specification decided."""
        for answer in answers:
            if isinstance(answer, Judgement | Decoded):
                self.totals.drawn += len(answer.token_ids) if isinstance(answer, Judgement) else 1
                self.totals.specified += answer.num_specified

    def _find_credit(self) -> dict[str, float]:
        """Return the credit of tenants for whose prefill other work is to rest, in seconds."""
        if not self._prefills:
            return {}
        busy = {work.lease.request.terms.tenant for work in self._steps}
        least_s = self.costs.start_s + MIN_CHUNK_TOKENS * self.costs.row_s(0)
        credit_s = {tenant: self._shares.credit(tenant) for tenant in self._prefills.keys() - busy}
        owed = {tenant: left_s for tenant, left_s in credit_s.items() if left_s > least_s}
        return owed if self._steps or self._ahead or len(owed) < len(self._prefills) else {}

    def _chunks_on_credit(self, credit_s: dict[str, float]) -> Scheduled:
        """Return prefill rows of tenants that have credit, which a step takes alone."""
        ready = self._ready() if credit_s else {}
        ready = {tenant: works for tenant, works in ready.items() if tenant in credit_s}
        if not ready:
            return []
        left_s = min(max(credit_s.values()), _MOST_RESTED_S - self._rested_s) - self.costs.start_s
        num_rows = self._num_rows(left_s, _depth_of(ready))
        return self._share(ready, num_rows) if num_rows >= MIN_CHUNK_TOKENS else []

    def _chunks(self, limit: int, *, is_alone: bool) -> Scheduled:
        """Return this step's prefill rows, at most `limit`."""
        ready = self._ready()
        if not ready:
            return []
        depth = _depth_of(ready)
        most = self._num_alone(depth) if is_alone else self._num_beside(depth)
        return self._share(ready, min(limit, most))

    def _share(self, ready: dict[str, list[Work]], limit: int) -> Scheduled:
        """Return at most so many prefill rows, shared by tenants, then by leases."""
        chunks: Scheduled = []
        row_s = self.costs.row_s(_depth_of(ready))
        order = sorted(ready, key=self._shares.level)  # stable: by turns among equals
        for num_served, tenant in enumerate(order):
            works, left = ready[tenant], order[num_served:]
            part = self._shares.divide(limit * row_s, left)[tenant] if row_s else limit / len(left)
            share = min(limit, max(round(part / (row_s or 1.0)), MIN_CHUNK_TOKENS))
            if share <= 0:
                break
            limit -= share
            for num_fed, work in enumerate(works):
                if share <= 0:
                    break
                most = min(share, max(share // (len(works) - num_fed), MIN_CHUNK_TOKENS))
                for feed in work.feeds(most):
                    chunks.append((work, feed))
                    share -= len(feed.token_ids)
            limit += share
            queue = self._prefills[tenant]
            queue.remove(works[0])
            queue.append(works[0])
        if chunks:
            self._prefills[order[0]] = self._prefills.pop(order[0])
        return chunks

    def _num_beside(self, depth: int) -> int:
        """Return the number of prefill rows for a step with other rows."""
        if self.costs.is_base_due:
            return 0
        base_s = self.costs.base_s.value or 0.0
        most_s = self._prefill_slowdown * base_s
        if len(self._spared) == _MOST_SAVED and min(self._spared) > most_s:
            self.costs.forget_base()  # steps without prefill have become slower
            return 0
        self._allowed_s = most_s
        allowed_s = most_s - base_s - self._owed_s
        num_rows = self._num_rows(allowed_s - self._waited_s, depth)
        if num_rows >= MIN_CHUNK_TOKENS:
            return num_rows
        # Few rows take long, so the time for a small chunk is saved up over steps. At least one row
        # is allowed in four steps, unless other work has just waited for prefill.
        saved_s = sum(most_s - seconds for seconds in self._spared)
        self._allowed_s += saved_s
        num_rows = self._num_rows(allowed_s + saved_s - self._waited_s, depth)
        if num_rows < MIN_CHUNK_TOKENS and len(self._spared) < _MOST_SAVED:
            return 0
        return num_rows if self._waited_s else max(num_rows, 1)

    def _num_alone(self, depth: int) -> int:
        """Return the number of prefill rows for a step without others; 0 while prefill rests."""
        base_s = self.costs.base_s.value
        if base_s is None or self._away_since is None:
            return self._step_tokens
        slowdown, start_s = self._prefill_slowdown - 1, self.costs.start_s
        away_s = self._clock() - self._away_since
        least_s = start_s + MIN_CHUNK_TOKENS * self.costs.row_s(depth)
        enough_s = math.inf if self.costs.is_base_due else least_s / slowdown - base_s
        rest_s = min(enough_s, base_s) - away_s  # at most the base after the last step with others
        if rest_s > 0:
            self.rest_s = rest_s
            return 0
        return max(self._num_rows(slowdown * (base_s + away_s) - start_s, depth), 1)

    def _num_rows(self, seconds: float, depth: int) -> int:
        """Return how many rows at `depth` take at most `seconds`, if known, or a small chunk."""
        if seconds <= 0:
            return 0
        if row_s := self.costs.row_s(depth):
            return min(int(seconds / row_s), self._step_tokens)
        # Where the fit has all of a step in its start, chunks grow until they show what a row
        # costs: by the mean of a row, which is more than that.
        mean_s = self.costs.mean_row_s or seconds
        return min(max(int(seconds / mean_s), MIN_CHUNK_TOKENS), self._step_tokens)

    def _ready(self) -> dict[str, list[Work]]:
        """Return the prefills that may run, by tenant."""
        # A page that several prompts share is computed by the one that began first.
        first_for: dict[int, Work] = {}
        for work in self.waiting():
            if work.next_page is not None:
                first_for.setdefault(work.next_page, work)
        ready = {
            tenant: [
                work
                for work in queue
                if work.next_page is None or first_for[work.next_page] is work
            ]
            for tenant, queue in self._prefills.items()
        }
        return {tenant: works for tenant, works in ready.items() if works}

    def _queue(self, work: Work) -> deque[Work]:
        if work.kind == "prefill":
            return self._prefills.setdefault(work.lease.request.terms.tenant, deque())
        return self._ahead if work.kind == "ahead" else self._steps


def _depth_of(ready: dict[str, list[Work]]) -> int:
    """Return the depth of the deepest of these prefills."""
    return max(work.depth for works in ready.values() for work in works)


def _is_prefill(one: tuple[Work, Feed]) -> bool:
    """Return whether rows are of a prompt, of an answer made elsewhere, or only score tokens."""
    work, feed = one
    return work.kind == "prefill" or not feed.num_wanted


def _prefills(scheduled: Scheduled) -> list[Feed]:
    return [each[1] for each in scheduled if _is_prefill(each)]


def _is_alone(scheduled: Scheduled) -> bool:
    """Return whether a step has no rows but those of prefill and of drafting ahead."""
    return all(work.kind in ("prefill", "ahead") for work, _ in scheduled)
