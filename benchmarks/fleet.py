"""A fleet of targets and drafters in simulation: our routing and scaling against Serve's defaults.

    python benchmarks/fleet.py [--seconds 600] [--seeds 1]

A discrete-event simulation without Ray. Requests arrive in bursts and ask about documents whose
popularity follows Zipf's law. Every request takes a lease on a target, is read there, takes a lease
on a drafter if it can, and is answered. Where a lease goes is decided by `cluster.routing.ranked`,
and how many replicas there are by `cluster.autoscaling.engines_wanted`: the functions that serve.
Reports reach the routers as late as in a service. Serve's defaults beside them are the power of two
choices, by exact numbers of requests, and scaling by ongoing requests.

**Times are rooflines, not measurements**: `rapid.planning` for Llama-3.1-8B on an H100 and 70B on
four, with a speedup by drafts that is assumed (`SPEEDUP`). So ratios between the policies mean
something, seconds do not. Left out: retrieval, the network, drafters' steps, partial eviction.

It takes about a minute of CPU time for a seed, with `--quick` twenty seconds.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fleet_engines import PAGE, QUESTION, Engine, Lease, Model, Request, trace  # noqa: E402
from reporting import keep, settings, shown, spread, table  # noqa: E402

from cluster.autoscaling import EngineLoad, PoolState, engines_wanted  # noqa: E402
from cluster.routing import Candidate, Need, has_room, ranked  # noqa: E402

SPEEDUP = 1.8  # of a drafted answer over a plain one, assumed
SHORT = 4500  # tokens of a drafter's prompt
GOAL_S, TARGET_WAIT_S, DRAFTER_WAIT_S = 10.0, 30.0, 5.0
REPORT_S, TICK_S, RETRY_S, LOOK_S = 1.0, 1.0, 0.5, 1.0
UP_S, DOWN_S = 2.0, 20.0  # Serve's delays, the defaults of our pools
ROUTERS = 12


@dataclass(frozen=True)
class Ways:
    """A way of routing requests and of scaling pools, which the simulation compares with others."""

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

    @property
    def all(self) -> list[Engine]:
        return [*self.running.values(), *self.others]

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
        if now - self.wish[1] < (UP_S if direction > 0 else DOWN_S):
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
            self.drained = [each for each in self.drained if now - each[0] <= DOWN_S]
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

    def drain(self) -> None:
        """Let the answers in progress end."""
        while any(each.num_requests for pool in (self.target, self.drafter) for each in pool.all):
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
    """The numbers of one simulated run over a trace of requests."""

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
    """Simulate every way, with all replicas from the start and scaled, on each seed's trace."""
    report: dict[str, Any] = {}
    with ProcessPoolExecutor(4) as processes:
        for kind in ("all replicas from the start", "scaled"):
            for ways in (SERVE, OURS):
                report.setdefault(kind, {})[ways.name] = [
                    processes.submit(outcome, ways, options, seed, is_fixed=kind != "scaled")
                    for seed in range(options.seeds)
                ]
        for by_ways in report.values():
            for ways, running in by_ways.items():
                outcomes = [each.result() for each in running]
                by_ways[ways] = {
                    name: spread([getattr(each, name) for each in outcomes])
                    for name in Outcome.__dataclass_fields__
                }
    return report


def outcome(ways: Ways, options: argparse.Namespace, seed: int, *, is_fixed: bool) -> Outcome:
    """Return what one fleet makes of the trace of a seed."""
    requests = trace(options.seconds, options.rate, options.documents, seed)
    return simulate(ways, requests, options.targets, options.drafters, is_fixed=is_fixed)


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
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second, beside bursts")
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--targets", type=int, default=100)
    parser.add_argument("--drafters", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one seed of three minutes")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.seeds = 180, 1
    report = measure(options)
    name = None if options.quick else "fleet"
    keep(name, "A fleet in simulation", told(report), {"settings": settings(options)} | report)


if __name__ == "__main__":
    main()
