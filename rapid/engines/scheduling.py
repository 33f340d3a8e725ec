"""Which rows go into the next forward."""

from __future__ import annotations

from collections import deque

from rapid.engines.batching import Feed
from rapid.engines.timings import StepCosts
from rapid.engines.work import Work

MIN_CHUNK_TOKENS = 16

Scheduled = list[tuple[Work, Feed]]


class Scheduler:
    """Verify, draft and decode rows first, then prefill chunks, then drafts made ahead.

    Prefill gets what is left of the budget, and beside other rows no more than keeps the step
    within `prefill_slowdown` of its time without them. Tenants that prefill share it equally, then
    each tenant's leases, taking turns at being first: neither a long prompt nor a crowd of them
    stalls the others, and some prefill always goes on.

    Drafting ahead takes what is left after that, in steps that do not verify or decode: nobody has
    asked for it yet, and those would wait for its rows.
    """

    def __init__(self, step_tokens: int, prefill_slowdown: float) -> None:
        self.costs = StepCosts()
        self._step_tokens = step_tokens
        self._prefill_slowdown = prefill_slowdown
        self._steps: deque[Work] = deque()
        self._prefills: dict[str, deque[Work]] = {}  # by tenant, whose turn it is first
        self._ahead: deque[Work] = deque()

    def add(self, work: Work) -> None:
        """Take on work that has begun."""
        self._queue(work).append(work)

    def drop(self, work: Work) -> None:
        """Forget work, done or not."""
        queue = self._queue(work)
        if work in queue:
            queue.remove(work)
        if work.kind == "prefill" and not queue:
            del self._prefills[work.lease.request.tenant]

    def waiting(self) -> list[Work]:
        """Prefills that are not finished, in the order they came."""
        works = [work for queue in self._prefills.values() for work in queue]
        return sorted(works, key=lambda work: work.began)

    def select(self) -> Scheduled:
        """The work of the next forward with its rows."""
        selected: Scheduled = []
        left = self._step_tokens
        for _ in range(len(self._steps)):
            if left <= 0:
                break
            work = self._steps.popleft()
            self._steps.append(work)
            feed = work.feed(left)
            selected.append((work, feed))
            left -= len(feed.token_ids)
        is_drafting = all(work.kind == "draft" for work, _ in selected)
        for work, feed in self._chunks(max(left, MIN_CHUNK_TOKENS), is_alone=not selected):
            selected.append((work, feed))
            left -= len(feed.token_ids)
        if is_drafting:
            for work in list(self._ahead)[: max(left, 0)]:
                selected.append((work, work.feed(1)))
        return selected

    def observe(self, seconds: float, scheduled: Scheduled) -> None:
        """Learn what a step took."""
        prefills = [feed for work, feed in scheduled if work.kind == "prefill"]
        self.costs.observe(seconds, prefills, is_mixed=len(prefills) < len(scheduled))

    def _chunks(self, limit: int, *, is_alone: bool) -> Scheduled:
        """Prefill rows of this step, at most `limit`, shared by tenants and then by leases."""
        chunks: Scheduled = []
        ready = self._ready()
        if ready and not is_alone:
            depth = max(work.depth for queue in ready.values() for work in queue)
            at_most = self.costs.num_rows(self._prefill_slowdown, depth, MIN_CHUNK_TOKENS)
            limit = min(limit, at_most)
        for num_served, (tenant, works) in enumerate(ready.items()):
            share = min(limit, max(limit // (len(ready) - num_served), MIN_CHUNK_TOKENS))
            if share <= 0:
                break
            limit -= share
            for num_fed, work in enumerate(works):
                if share <= 0:
                    break
                feed = work.feed(min(share, max(share // (len(works) - num_fed), MIN_CHUNK_TOKENS)))
                chunks.append((work, feed))
                share -= len(feed.token_ids)
            limit += share
            queue = self._prefills[tenant]
            queue.remove(works[0])
            queue.append(works[0])
        if chunks:
            first = next(iter(ready))
            self._prefills[first] = self._prefills.pop(first)
        return chunks

    def _ready(self) -> dict[str, list[Work]]:
        """By tenant; a page that several prompts have is computed by the one that came first."""
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
            return self._prefills.setdefault(work.lease.request.tenant, deque())
        return self._ahead if work.kind == "ahead" else self._steps
