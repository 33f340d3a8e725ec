"""The engines of `fleet.py` in simulated time, as `rapid.engines` serves.

A lease gets all its pages at once; the oldest in the queue comes first. A document's pages are
shared, and stay when the lease ends, until room is needed: then the tail of the document that was
asked for longest ago goes first. Prompts that are read at once share the time, and where several
have a document in common, one reads it and the others wait for that. Beside answers, reading gets
the share of the time that `prefill_slowdown` leaves it.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.fleet.fleet_traces import PAGE, QUESTION, Model, Request
from cluster.reports import EngineReport, list_held_documents
from cluster.routing import Need

BESIDE = 4.0  # `prefill_slowdown`: prompts get three quarters of the time beside answers
NAMED = 32  # documents that a report names, as `cluster.reports`
NEVER = float("inf")


class Calendar(Protocol):
    """The part of a simulated fleet that its engines call."""

    def at(self, when: float, what: Callable[[float], None]) -> None:
        """Call `what` at a time."""
        ...

    def prefilled(self, engine: Engine, need: Need, num_tokens: int) -> None:
        """Count tokens that an engine will read."""
        ...


@dataclass(eq=False)
class Lease:
    """A request at an engine: waiting, being read, then answered."""

    request: Request
    need: Need
    opened: Callable[[float], None]
    read: Callable[[float], None]
    unread_s: float = 0.0
    is_open: bool = False
    engine: Engine | None = None

    @property
    def document(self) -> int:
        """Tokens of the prompt that other questions share."""
        return self.need.prompt_tokens - QUESTION if self.need.document else 0

    def release(self, now: float) -> None:
        """End the lease."""
        assert self.engine is not None
        self.engine.release(self, now)


class Engine:
    """A replica: its pages, queue, prefix cache, clock and reports.

    Attributes:
        queue: Leases that wait for room.
        leases: Open leases by the numbers of their requests.
        held: Tokens of each document in the cache, the one asked for longest ago first.
        users: Open leases on each document.
        reading: Leases whose prompts are read.
        kv_tokens: Tokens that a step of the answers in progress attends to.
        reports: The last two reports.
    """

    def __init__(self, fleet: Calendar, model: Model, name: str) -> None:
        self.fleet, self.model, self.name = fleet, model, name
        self.is_draining = False
        self.queue: deque[Lease] = deque()
        self.leases: dict[int, Lease] = {}
        self.held: OrderedDict[str, int] = OrderedDict()
        self.users = Counter[str]()
        self.reading: list[Lease] = []
        self.answering: list[tuple[float, int, Callable[[float], None]]] = []  # by steps at the end
        self.kv_tokens = 0
        self.reports: deque[EngineReport] = deque(maxlen=2)
        self._asked: OrderedDict[str, int] = OrderedDict()  # what the replica takes for held
        self._readers = Counter[str]()
        self._tails: dict[int, int] = {}
        self._steps = self._since = 0.0
        self._version = 0

    @property
    def num_requests(self) -> int:
        """Leases that are open or wait."""
        return len(self.leases) + len(self.queue)

    @property
    def pages_in_use(self) -> int:
        """Pages that leases hold."""
        shared = sum(tokens // PAGE for name, tokens in self.held.items() if self.users[name])
        return shared + sum(self._tails.values())

    def submit(self, lease: Lease, now: float) -> None:
        """Open a lease, now or as soon as there is room."""
        lease.engine = self
        if name := lease.need.document:
            self._asked[name] = max(self._asked.pop(name, 0), lease.need.prompt_tokens)
            while len(self._asked) > NAMED:
                self._asked.popitem(last=False)
            self._readers[name] += 1
        self.queue.append(lease)
        self._admit(now)

    def withdraw(self, lease: Lease, now: float) -> None:
        """Take a lease out of the queue."""
        self.queue.remove(lease)
        self._readers[lease.need.document] -= 1
        self._admit(now)

    def answer(self, lease: Lease, steps: float, done: Callable[[float], None], now: float) -> None:
        """Call `done` after that many steps of decoding."""
        self._advance(now)
        self.kv_tokens += lease.need.prompt_tokens
        heapq.heappush(self.answering, (self._steps + steps, lease.request.number, done))
        self._plan(now)

    def release(self, lease: Lease, now: float) -> None:
        """End a lease: it is answered, or was of no use."""
        self._advance(now)
        del self.leases[lease.request.number]
        del self._tails[lease.request.number]
        if lease in self.reading:
            self.reading.remove(lease)
        self.users[lease.need.document] -= 1
        self._readers[lease.need.document] -= 1
        self._admit(now)

    def report(self, now: float) -> None:
        """Make a report, from what a replica knows."""
        self._advance(now)
        waiting = {
            each.need.document or str(number): each.need.prompt_tokens
            for number, each in enumerate(self.queue)
        }
        speed = self.model.read_tokens_per_s
        unread = speed * sum(each.unread_s for each in self.reading) + sum(waiting.values())
        named = list_held_documents(self._asked, self.model.pages * PAGE)
        report = EngineReport(
            at=now,
            pages_free=self.model.pages - self.pages_in_use,
            pages_total=self.model.pages,
            page_tokens=PAGE,
            leases_free=self.model.max_leases - len(self.leases),
            num_requests=self.num_requests,
            leases_waiting=len(self.queue),
            tokens_waiting=int(unread),
            prefill_tokens_per_s=speed,
            documents=named,
            in_use=[name for name in named if self._readers[name]],
        )
        self.reports.append(report)

    def _admit(self, now: float) -> None:
        self._advance(now)
        while self.queue and len(self.leases) < self.model.max_leases:
            lease = self.queue[0]
            need, name = lease.need, lease.need.document
            tail = -(-(need.prompt_tokens - lease.document + need.answer_tokens) // PAGE)
            fresh = 0 if self.users[name] else lease.document // PAGE
            if tail + fresh > self.model.pages - self.pages_in_use:
                break
            self.queue.popleft()
            known = self.held.get(name, 0)
            lease.unread_s = self.model.prefill_s(known, need.prompt_tokens)
            self.fleet.prefilled(self, need, need.prompt_tokens - known)
            self.leases[lease.request.number] = lease
            self._tails[lease.request.number] = tail
            self.users[name] += 1
            if name:
                self.held[name] = lease.document
                self.held.move_to_end(name)
            self._evict()
            lease.is_open = True
            self.reading.append(lease)
            lease.opened(now)
        self._plan(now)

    def _evict(self) -> None:
        kept = sum(tokens // PAGE for tokens in self.held.values()) + sum(self._tails.values())
        over = kept - self.model.pages
        for name in [name for name in self.held if not self.users[name]]:
            if over <= 0:
                return
            pages = self.held[name] // PAGE
            if pages <= over:
                del self.held[name]
            else:
                self.held[name] = (pages - over) * PAGE
            over -= pages

    def _advance(self, now: float) -> None:
        """Do the work of the time since the last event."""
        seconds, self._since = now - self._since, now
        first = self._first_readers()
        for each in first:
            each.unread_s -= seconds * self._reading_share() / len(first)
        if self.answering:
            self._steps += seconds / self._step_s()

    def _first_readers(self) -> list[Lease]:
        """Return the leases whose prompts go on: one for each document."""
        first: dict[str, Lease] = {}
        for each in self.reading:
            first.setdefault(each.need.document or str(each.request.number), each)
        return list(first.values())

    def _reading_share(self) -> float:
        return 1 - 1 / BESIDE if self.answering else 1.0

    def _step_s(self) -> float:
        alone = self.model.weights_s + self.model.token_s * self.kv_tokens
        return alone * (BESIDE if self.reading else 1.0)

    def _plan(self, now: float) -> None:
        """Put the engine's next event on the fleet's calendar."""
        self._version += 1
        first = self._first_readers()
        least_s = min((each.unread_s for each in first), default=NEVER)
        read_s = max(least_s, 0.0) * len(first) / self._reading_share() if first else NEVER
        end = self.answering[0][0] if self.answering else NEVER
        answered_s = max(end - self._steps, 0.0) * self._step_s()
        if (soon_s := min(read_s, answered_s)) < NEVER:
            version = self._version
            self.fleet.at(now + soon_s, lambda then: self._wake(then, version))

    def _wake(self, now: float, version: int) -> None:
        if version != self._version:
            return
        self._advance(now)
        read = [each for each in self._first_readers() if each.unread_s <= 1e-9]
        self.reading = [each for each in self.reading if each not in read]
        done = [each.read for each in read]
        while self.answering and self.answering[0][0] <= self._steps + 1e-9:
            _, number, end = heapq.heappop(self.answering)
            self.kv_tokens -= self.leases[number].need.prompt_tokens
            done.append(end)
        for each in done:
            each(now)
        self._plan(now)
