"""A fleet of targets and drafters in simulation: our routing and scaling against Serve's defaults.

    python benchmarks/fleet.py [--seconds 600] [--seeds 2]

A discrete-event simulation without Ray. Requests arrive in bursts and ask about documents whose
popularity follows Zipf's law. Every request takes a lease on a target, is read there, takes a lease
on a drafter if it can, and is answered. Where a lease goes is decided by `cluster.routing.ranked`,
and how many replicas there are by `cluster.autoscaling.engines_wanted`: the functions that serve.
Reports reach the routers as late as in a service. Serve's defaults beside them are the power of two
choices, by exact numbers of requests, and scaling by ongoing requests.

**Times are rooflines, not measurements**: `rapid.planning` for Llama-3.1-8B on an H100 and 70B on
four, with a speedup by drafts that is assumed (`SPEEDUP`). So ratios between the policies mean
something, seconds do not. Left out: retrieval, the network, drafters' steps, partial eviction.

It takes about three minutes of CPU time, with `--quick` twenty seconds.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import sys
from bisect import bisect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from reporting import keep, settings, shown, spread, table  # noqa: E402

from cluster.autoscaling import EngineLoad, PoolState, engines_wanted  # noqa: E402
from cluster.reports import EngineReport, held_documents  # noqa: E402
from cluster.routing import Candidate, Need, has_room, ranked  # noqa: E402
from rapid.planning.plan import COMPUTE_SHARE, GPUS, Replica  # noqa: E402
from rapid.planning.shapes import KNOWN_SHAPES  # noqa: E402

PAGE = 16
SPEEDUP = 1.8  # of a drafted answer over a plain one, assumed
QUESTION, SHORT = 64, 4500  # tokens of a question, and of a drafter's prompt
GOAL_S, TARGET_WAIT_S, DRAFTER_WAIT_S = 10.0, 30.0, 5.0
REPORT_S, TICK_S, RETRY_S, LOOK_S = 1.0, 1.0, 0.25, 1.0
ROUTERS = 12
BESIDE = 4.0  # `prefill_slowdown`: prompts get three quarters of the time beside answers


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
        """What its lease on a target takes."""
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

    def __init__(self, fleet: Fleet, model: Model, name: str, ready_at: float) -> None:
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


@dataclass(frozen=True)
class Ways:
    """How a fleet routes and scales."""

    name: str
    by_room: bool
    by_work: bool


class Pool:
    """Replicas of one model, their routers and their autoscaler."""

    def __init__(self, fleet: Fleet, model: Model, ways: Ways, start: int, most: int) -> None:
        self.fleet, self.model, self.ways, self.most = fleet, model, ways, most
        self.names = itertools.count()
        self.running: dict[str, Engine] = {}
        self.others: list[Engine] = []  # starting or draining
        self.assigned: list[dict[int, tuple[str, Need, float]]] = [{} for _ in range(ROUTERS)]
        self.queued = 0
        self.gpu_s = 0.0
        self.target = start
        self.drained: list[tuple[float, EngineLoad]] = []
        self.wish: tuple[int, float] | None = None  # the direction of a change, and since when
        self.past: deque[float] = deque(maxlen=2)
        for _ in range(start):
            self._start(0.0)

    def order(self, router: int, need: Need, now: float) -> Sequence[str]:
        """Return the replicas to try."""
        if not self.ways.by_room:
            two = self.fleet.draw.sample(list(self.running.values()), min(2, len(self.running)))
            return [each.name for each in sorted(two, key=lambda each: each.num_requests)]
        return ranked(
            need,
            self._candidates(router),
            target_ongoing=self.model.target_ongoing,
            first_token_goal_s=GOAL_S,
            draw=self.fleet.draw.sample,
        )

    def _candidates(self, router: int) -> list[Candidate]:
        """Return the replicas as a router knows them."""
        assigned: dict[str, list[Need]] = {}
        mine = self.assigned[router]
        for number, (name, taken, since) in list(mine.items()):
            engine = self.running.get(name)
            if engine is None or (engine.visible and since < engine.visible.at):
                del mine[number]
            else:
                assigned.setdefault(name, []).append(taken)
        return [
            Candidate(each.name, each.num_requests, each.visible, assigned.get(each.name, ()))
            for each in self.running.values()
        ]

    def ask(
        self, lease: Lease, wait_s: float, refused: Callable[[float], None], now: float
    ) -> None:
        """Send a lease to a replica, now or as soon as one takes it; give up after `wait_s`."""
        router, until = lease.request.number % ROUTERS, now + wait_s
        self.queued += 1

        def attempt(now: float) -> None:
            if now >= until:
                self.queued -= 1
                refused(now)
                return
            for name in self.order(router, lease.need, now):
                engine = self.running[name]
                if engine.num_requests < self.model.max_leases:
                    self.queued -= 1
                    self.assigned[router][lease.request.number] = (name, lease.need, now)
                    lease.engine = engine
                    engine.submit(lease, now)
                    if not lease.is_open:
                        self.fleet.at(now + LOOK_S, look)
                    return
            self.fleet.at(now + RETRY_S, attempt)

        def look(now: float) -> None:
            """Give up in time; move to where there is room by now."""
            assert lease.engine is not None
            if lease.is_open:
                return
            if now >= until:
                lease.engine.withdraw(lease, now)
                refused(now)
            elif self.ways.by_room and self._has_room_beside(lease.engine, router, lease.need):
                lease.engine.withdraw(lease, now)
                self.queued += 1
                attempt(now)
            else:
                self.fleet.at(min(now + LOOK_S, until), look)

        attempt(now)

    def _has_room_beside(self, engine: Engine, router: int, need: Need) -> bool:
        return any(
            has_room(need, each, self.model.target_ongoing)
            for each in self._candidates(router)
            if each.replica != engine.name
        )

    def tick(self, now: float) -> None:
        """Run the controller once."""
        for each in [each for each in self.others if each.ready_at <= now]:
            if not each.is_draining:
                self.others.remove(each)
                self.running[each.name] = each
            elif not each.num_requests:
                self.others.remove(each)
        self.gpu_s += TICK_S * self.model.gpus * (len(self.running) + len(self.others))
        if self.fleet.is_fixed:
            return
        wanted = min(max(self._wanted(now), 1), self.most)
        if wanted == self.target:
            self.wish = None
            return
        direction = 1 if wanted > self.target else -1
        if self.wish is None or self.wish[0] != direction:
            self.wish = (direction, now)
        if now - self.wish[1] < (2.0 if direction > 0 else 20.0):  # Serve's delays
            return
        self.wish = None
        for _ in range(wanted - self.target):
            self._start(now)
        for _ in range(self.target - wanted):  # Serve looks at no load: the newest goes
            starting = [each for each in self.others if not each.is_draining]
            engine = starting[-1] if starting else self.running.pop(next(reversed(self.running)))
            if not starting:
                self.others.append(engine)
            engine.is_draining = True
            self.drained.append((now, engine.load()))
        self.target = wanted

    def _wanted(self, now: float) -> int:
        running = list(self.running.values())
        if self.ways.by_work:
            self.drained = [each for each in self.drained if now - each[0] <= 20.0]
            state = PoolState(
                self.target,
                [each.load() for each in running],
                self.queued,
                [load for _, load in self.drained],
            )
            return engines_wanted(
                state, target_ongoing=self.model.target_ongoing, first_token_goal_s=GOAL_S
            )
        self.past.append(self.queued + sum(each.num_requests for each in running))
        return -(-int(statistics.mean(self.past)) // int(self.model.target_ongoing))

    def _start(self, now: float) -> None:
        ready_at = now + self.model.start_s if now else 0.0
        engine = Engine(self.fleet, self.model, f"{self.model.name}-{next(self.names)}", ready_at)
        engine.since = now
        if now:
            self.others.append(engine)
        else:
            self.running[engine.name] = engine
        self.fleet.at(
            now + self.fleet.draw.random() * REPORT_S, lambda then: self._report(engine, then)
        )

    def _report(self, engine: Engine, now: float) -> None:
        engine.advance(now)
        engine.visible, engine.snapshot = engine.snapshot, engine.report(now)
        if engine in self.others and engine.is_draining and not engine.num_requests:
            return
        self.fleet.at(now + REPORT_S, lambda then: self._report(engine, then))


class Fleet:
    """Pools of targets and drafters that answer a trace.

    Attributes:
        first_tokens: Seconds to the first token of each request that was answered.
        refused: Number of requests without a lease in time (503).
        plain: Number of answers without a drafter.
        ideal_tokens: Prompt tokens that one cache as large as all targets' together would read.
    """

    def __init__(
        self, ways: Ways, targets: int, drafters: int, *, is_fixed: bool, seed: int
    ) -> None:
        self.draw = random.Random(seed)
        self.is_fixed = is_fixed
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = itertools.count()
        self.first_tokens: list[float] = []
        self.refused = self.plain = 0
        self.ideal_tokens = self.target_tokens = 0
        self.cached: OrderedDict[str, int] = OrderedDict()
        few = 1.0 if is_fixed else 0.5
        self.target = Pool(
            self, Model("llama-3.1-8b", 1, 60.0, 6), ways, max(int(few * targets), 1), targets
        )
        self.drafter = Pool(
            self, Model("llama-3.1-70b", 4, 180.0, 12), ways, max(int(few * drafters), 1), drafters
        )

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), what))

    def run(self, requests: Sequence[Request]) -> None:
        """Answer all requests."""
        for request in requests:
            self.at(request.at, lambda now, request=request: self._arrive(request, now))  # type: ignore[misc]
        self.at(0.0, self._tick)
        while len(self.first_tokens) + self.refused < len(requests):
            self.now, _, what = heapq.heappop(self.events)
            what(self.now)

    def prefilled(self, engine: Engine, need: Need, num_tokens: int) -> None:
        """Count what was read, and what one cache as large as all together would have read."""
        if engine.model is not self.target.model:
            return
        self.target_tokens += num_tokens
        known = self.cached.pop(need.document, 0)
        self.ideal_tokens += need.prompt_tokens - known
        self.cached[need.document] = need.prompt_tokens - QUESTION
        room = len(self.target.running) * engine.model.pages * PAGE
        while sum(self.cached.values()) > room:
            self.cached.popitem(last=False)

    def _tick(self, now: float) -> None:
        self.target.tick(now)
        self.drafter.tick(now)
        self.at(now + TICK_S, self._tick)

    def _arrive(self, request: Request, now: float) -> None:
        def opened(now: float) -> None:
            self.drafter.ask(drafting, DRAFTER_WAIT_S, lambda now: None, now)

        def drafter_opened(now: float) -> None:
            if is_done:  # too late: it was answered plainly
                drafting.release(now)

        def read(now: float) -> None:
            self.first_tokens.append(now - request.at)
            self.plain += not drafting.is_open
            steps = request.answer_tokens / (SPEEDUP if drafting.is_open else 1.0)
            assert verifying.engine is not None
            verifying.engine.answer(steps, done, now)

        def done(now: float) -> None:
            is_done.append(True)
            verifying.release(now)
            if drafting.is_open:
                drafting.release(now)

        def refused(now: float) -> None:
            self.refused += 1

        is_done: list[bool] = []
        verifying = Lease(request, request.need, opened, read)
        short = Need("", SHORT, request.answer_tokens)
        drafting = Lease(request, short, drafter_opened, lambda now: None)
        self.target.ask(verifying, TARGET_WAIT_S, refused, now)


@dataclass(frozen=True)
class Outcome:
    """What one way of routing and scaling gave for one trace."""

    in_time: float  # share of the requests whose first token came within the goal
    refused: int
    plain: float  # share of the answers without a drafter
    waste: float  # prompt tokens read, over what one cache of the whole fleet would have read
    gpu_hours: float

    @classmethod
    def of(cls, fleet: Fleet) -> Outcome:
        answered = len(fleet.first_tokens)
        total = answered + fleet.refused
        return cls(
            sum(seconds <= GOAL_S for seconds in fleet.first_tokens) / total,
            fleet.refused,
            fleet.plain / max(answered, 1),
            fleet.target_tokens / fleet.ideal_tokens,
            (fleet.target.gpu_s + fleet.drafter.gpu_s) / 3600,
        )


SERVE = Ways("Serve's defaults", by_room=False, by_work=False)
OURS = Ways("ours", by_room=True, by_work=True)


def simulate(
    ways: Ways, requests: Sequence[Request], targets: int, drafters: int, *, is_fixed: bool
) -> Outcome:
    """Return what one fleet makes of a trace."""
    fleet = Fleet(ways, targets, drafters, is_fixed=is_fixed, seed=1)
    fleet.run(requests)
    return Outcome.of(fleet)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for kind, rate in (("all replicas from the start", 1.0), ("scaled", 1.0)):
        for ways in (SERVE, OURS):
            outcomes = [
                simulate(
                    ways,
                    trace(options.seconds, rate * options.rate, options.documents, seed),
                    options.targets,
                    options.drafters,
                    is_fixed=kind != "scaled",
                )
                for seed in range(options.seeds)
            ]
            report.setdefault(kind, {})[ways.name] = {
                name: spread([getattr(each, name) for each in outcomes])
                for name in Outcome.__dataclass_fields__
            }
    return report


def told(report: dict[str, Any]) -> str:
    """Return the table."""
    header = ["replicas", "", "first token in time", "503", "plain", "read / ideal", "GPU-hours"]
    rows = []
    for kind, by_ways in report.items():
        for ways, found in by_ways.items():
            digits = {"refused": 0, "gpu_hours": 1}
            rows.append([kind, ways, *(shown(found[n], digits.get(n, 3)) for n in found)])
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="length of the trace")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second, beside bursts")
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--targets", type=int, default=100)
    parser.add_argument("--drafters", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed of three minutes")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.seeds = 180, 1
    report = measure(options)
    name = None if options.quick else "fleet"
    keep(name, "A fleet in simulation", told(report), {"settings": settings(options)} | report)


if __name__ == "__main__":
    main()
