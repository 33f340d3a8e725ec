"""The replicas of `fleet.py`: models by the roofline, requests, and engines in simulated time."""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.autoscaling import EngineLoad
from cluster.reports import EngineReport, held_documents
from cluster.routing import Need
from rapid.planning.plan import COMPUTE_SHARE, GPUS, Replica
from rapid.planning.shapes import KNOWN_SHAPES

PAGE = 16
QUESTION = 64  # tokens of a question
BESIDE = 4.0  # `prefill_slowdown`: prompts get three quarters of the time beside answers


class Calendar(Protocol):
    """The part of a simulated fleet that its engines call."""

    def at(self, when: float, what: Callable[[float], None]) -> None:
        """Call `what` at a time."""
        ...

    def prefilled(self, engine: Engine, need: Need, num_tokens: int) -> None:
        """Count tokens that an engine will read."""
        ...


@dataclass(frozen=True)
class Model:
    """A model on its GPUs, by the roofline.

    Attributes:
        gpus: GPUs of a replica.
        pages: KV pages of a replica.
        weights_s: Seconds of a step that reads the weights alone.
        token_s: Seconds that a token of KV adds to a step.
        start_s: Seconds from the decision to a replica that runs.
        target_ongoing: Requests that a replica should have.
        max_leases: Requests that it takes.
    """

    name: str
    gpus: int
    start_s: float
    target_ongoing: float
    max_leases: int = 16
    replica: Replica = field(init=False)
    pages: int = field(init=False)
    weights_s: float = field(init=False)
    token_s: float = field(init=False)

    def __post_init__(self) -> None:
        one = Replica(KNOWN_SHAPES[self.name][1], GPUS["h100-sxm"], 0, self.gpus)
        room = one.usable - one.need(self.max_leases).total
        set_ = object.__setattr__
        set_(self, "replica", one)
        set_(self, "pages", int(room / one.shape.kv_bytes_per_token(2) / PAGE))
        set_(self, "weights_s", one.step_s(1))
        set_(self, "token_s", replace(one, context=100_000).step_s(1) / 1e5 - one.step_s(1) / 1e5)

    def prefill_s(self, start: int, stop: int) -> float:
        """Seconds of reading the tokens from `start` to `stop` of a prompt."""
        shape, flops = self.replica.shape, self.gpus * self.replica.gpu.flops * COMPUTE_SHARE
        return (shape.prefill_flops(stop) - shape.prefill_flops(start)) / flops


@dataclass(frozen=True)
class Request:
    """A request of the trace."""

    number: int
    at: float
    document: str
    document_tokens: int
    answer_tokens: int

    @property
    def need(self) -> Need:
        """The pages and leases that this request takes of a target."""
        return Need(self.document, self.document_tokens + QUESTION, self.answer_tokens)


def trace(seconds: float, rate: float, num_documents: int, seed: int) -> list[Request]:
    """Return requests: Poisson, three times as many in every third tenth, documents by Zipf.

    A document has 8K to 120K tokens, log-normal around 40K, and an answer 100 to 500.
    """
    draw = random.Random(seed)
    lengths = [
        int(min(max(draw.lognormvariate(10.6, 0.7), 8e3), 12e4)) for _ in range(num_documents)
    ]
    shares = list(itertools.accumulate(1 / (rank + 1) for rank in range(num_documents)))
    requests: list[Request] = []
    now = 0.0
    while True:
        is_burst = int(10 * now / seconds) % 3 == 1
        now += draw.expovariate(rate * (3 if is_burst else 1))
        if now >= seconds:
            return requests
        rank = bisect(shares, draw.random() * shares[-1])
        answer = draw.randint(100, 500)
        requests.append(Request(len(requests), now, f"{rank:08d}", lengths[rank], answer))


@dataclass
class Lease:
    """A request at an engine: waiting, being read, then answered."""

    request: Request
    need: Need
    opened: Callable[[float], None]
    read: Callable[[float], None]
    unread_s: float = 0.0
    is_open: bool = False
    engine: Engine | None = None

    def release(self, now: float) -> None:
        assert self.engine is not None
        self.engine.release(self, now)


class Engine:
    """A replica's pages, queue, prefix cache and clock; prompts are read one after the other."""

    def __init__(self, fleet: Calendar, model: Model, name: str, ready_at: float) -> None:
        self.fleet, self.model, self.name, self.ready_at = fleet, model, name, ready_at
        self.is_draining = False
        self.queue: deque[Lease] = deque()
        self.leases: set[int] = set()
        self.documents: OrderedDict[str, int] = OrderedDict()  # tokens, least recently used first
        self.users = Counter[str]()
        self.pages_in_use = 0
        self.tails: dict[int, int] = {}
        self.reading: deque[Lease] = deque()
        self.answering: list[tuple[float, int, Callable[[float], None]]] = []  # by steps at the end
        self.kv_tokens = 0
        self.steps = self.since = 0.0
        self.prefilled = 0
        self.version = 0
        self.visible: EngineReport | None = None
        self.snapshot: EngineReport | None = None

    @property
    def num_requests(self) -> int:
        return len(self.leases) + len(self.queue)

    def submit(self, lease: Lease, now: float) -> None:
        self.queue.append(lease)
        self._admit(now)

    def withdraw(self, lease: Lease, now: float) -> None:
        self.queue.remove(lease)
        self._admit(now)

    def answer(self, steps: float, done: Callable[[float], None], now: float) -> None:
        """Call `done` after that many steps of decoding."""
        self.advance(now)
        heapq.heappush(self.answering, (self.steps + steps, id(done), done))
        self._plan(now)

    def release(self, lease: Lease, now: float) -> None:
        self.advance(now)
        need = lease.need
        self.leases.remove(lease.request.number)
        self.pages_in_use -= self.tails.pop(lease.request.number)
        self.kv_tokens -= need.prompt_tokens
        if need.document:
            self.users[need.document] -= 1
            if not self.users[need.document]:
                self.pages_in_use -= self.documents[need.document] // PAGE
        self._admit(now)

    def report(self, now: float) -> EngineReport:
        return EngineReport(
            at=now,
            pages_free=self.model.pages - self.pages_in_use,
            pages_total=self.model.pages,
            page_tokens=PAGE,
            leases_free=self.model.max_leases - len(self.leases),
            num_requests=self.num_requests,
            leases_waiting=len(self.queue),
            tokens_waiting=int(self.waiting_s / self._token_s()),
            prefill_tokens_per_s=1 / self._token_s(),
            documents=held_documents(self.documents, self.model.pages * PAGE),
            in_use=[name for name in self.documents if self.users[name]],
        )

    @property
    def waiting_s(self) -> float:
        """Seconds of reading that wait."""
        unread = sum(lease.unread_s for lease in self.reading)
        return unread + sum(self._unread_s(lease.need) for lease in self.queue)

    def load(self) -> EngineLoad:
        return EngineLoad(self.num_requests, self.pages_in_use, self.model.pages, self.waiting_s)

    def _token_s(self) -> float:
        return self.model.prefill_s(0, 40_000) / 40_000

    def _unread_s(self, need: Need) -> float:
        known = self.documents.get(need.document, 0)
        return self.model.prefill_s(known, need.prompt_tokens)

    def _admit(self, now: float) -> None:
        self.advance(now)
        while self.queue and len(self.leases) < self.model.max_leases:
            lease = self.queue[0]
            need = lease.need
            document = need.prompt_tokens - QUESTION if need.document else 0
            tail = -(-(need.prompt_tokens - document + need.answer_tokens) // PAGE)
            fresh = 0 if self.users[need.document] else document // PAGE
            if tail + fresh > self.model.pages - self.pages_in_use:
                break
            self.queue.popleft()
            lease.unread_s = self._unread_s(need)
            new_tokens = need.prompt_tokens - self.documents.get(need.document, 0)
            self.prefilled += new_tokens
            self.fleet.prefilled(self, need, new_tokens)
            self.leases.add(lease.request.number)
            self.tails[lease.request.number] = tail
            self.pages_in_use += tail + fresh
            self.kv_tokens += need.prompt_tokens
            if need.document:
                self.users[need.document] += 1
                self.documents[need.document] = document
                self.documents.move_to_end(need.document)
            self._evict()
            lease.is_open = True
            self.reading.append(lease)
            lease.opened(now)
        self._plan(now)

    def _evict(self) -> None:
        idle = sum(
            tokens // PAGE for name, tokens in self.documents.items() if not self.users[name]
        )
        for name in [name for name in self.documents if not self.users[name]]:
            if self.pages_in_use + idle <= self.model.pages:
                return
            idle -= self.documents.pop(name) // PAGE

    def advance(self, now: float) -> None:
        """Do the work of the time since the last event."""
        seconds, self.since = now - self.since, now
        if self.reading:
            self.reading[0].unread_s -= seconds * self._reading_share()
        if self.answering:
            self.steps += seconds / self._step_s()

    def _reading_share(self) -> float:
        return 1 - 1 / BESIDE if self.answering else 1.0

    def _step_s(self) -> float:
        alone = self.model.weights_s + self.model.token_s * self.kv_tokens
        return alone * (BESIDE if self.reading else 1.0)

    def _plan(self, now: float) -> None:
        """Put the engine's next event on the fleet's calendar."""
        self.version += 1
        times = []
        if self.reading:
            times.append(max(self.reading[0].unread_s, 0.0) / self._reading_share())
        if self.answering:
            times.append(max(self.answering[0][0] - self.steps, 0.0) * self._step_s())
        if times:
            version = self.version
            self.fleet.at(now + min(times), lambda then: self._wake(then, version))

    def _wake(self, now: float, version: int) -> None:
        if version != self.version:
            return
        self.advance(now)
        done: list[Callable[[float], None]] = []
        while self.reading and self.reading[0].unread_s <= 1e-9:
            done.append(self.reading.popleft().read)
        while self.answering and self.answering[0][0] <= self.steps + 1e-9:
            done.append(heapq.heappop(self.answering)[2])
        for each in done:
            each(now)
        self._plan(now)
