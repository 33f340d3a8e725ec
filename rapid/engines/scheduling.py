"""Which rows go into the next forward."""

from __future__ import annotations

from collections import deque

from rapid.engines.batching import Feed
from rapid.engines.work import Work

MIN_CHUNK_TOKENS = 16


class Scheduler:
    """Verify, draft and decode rows first, then prefill chunks in what is left of the budget.

    Prefilling leases share what is left equally and take turns at being first, so neither a long
    prompt nor a crowd of them stalls the others; some prefill happens in every step.
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._steps: deque[Work] = deque()
        self._prefills: deque[Work] = deque()

    def add(self, work: Work) -> None:
        """Take on work that has begun."""
        (self._prefills if work.is_prefill else self._steps).append(work)

    def drop(self, work: Work) -> None:
        """Forget work, done or not."""
        queue = self._prefills if work.is_prefill else self._steps
        if work in queue:
            queue.remove(work)

    def waiting(self) -> list[Work]:
        """Prefills that are not finished, in the order they came."""
        return sorted(self._prefills, key=lambda work: work.began)

    def select(self) -> list[tuple[Work, Feed]]:
        """The work of the next forward with its rows."""
        selected: list[tuple[Work, Feed]] = []
        left = self._step_tokens
        for _ in range(len(self._steps)):
            if left <= 0:
                break
            work = self._steps.popleft()
            self._steps.append(work)
            feed = work.feed(left)
            selected.append((work, feed))
            left -= len(feed.token_ids)
        left = max(left, MIN_CHUNK_TOKENS)
        ready = self._ready()
        waiting = len(ready)
        for work in ready:
            if left <= 0:
                break
            feed = work.feed(min(left, max(left // waiting, MIN_CHUNK_TOKENS)))
            selected.append((work, feed))
            left -= len(feed.token_ids)
            waiting -= 1
        self._prefills.rotate(-1)
        return selected

    def _ready(self) -> list[Work]:
        """A page that several prompts have is computed by the one that came first."""
        first_for: dict[int, Work] = {}
        for work in self.waiting():
            if work.next_page is not None:
                first_for.setdefault(work.next_page, work)
        return [
            work
            for work in self._prefills
            if work.next_page is None or first_for[work.next_page] is work
        ]
