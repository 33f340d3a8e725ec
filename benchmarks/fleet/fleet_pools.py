"""The pools of `fleet.py`: routers that know replicas by old reports, and an autoscaler."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.fleet.fleet_engines import Calendar, Engine, Lease
from benchmarks.fleet.fleet_traces import Model
from cluster.autoscaling import (
    EngineLoad,
    PoolState,
    engines_wanted,
    load_of,
)
from cluster.reports import EngineReport
from cluster.routing import Candidate, Need, has_room, rank_candidates

GOAL_S = 10.0  # `first_token_goal_s`
TICK_S = 1.0  # between two decisions about the number of replicas
REPORT_S = 1.0  # between two reports of a replica
LATE_S = 0.5  # from a report to the routers that know it, and from an assignment to its count
RETRY_S, LOOK_S = 0.5, 1.0  # of a request that no replica takes, and of one that waits
ROUTERS = 12


@dataclass(frozen=True)
class Ways:
    """A way of routing requests and of scaling pools, which the simulation compares with others."""

    name: str
    by_room: bool
    by_work: bool


SERVE = Ways("Serve's defaults", by_room=False, by_work=False)
OURS = Ways("ours", by_room=True, by_work=True)


class World(Calendar, Protocol):
    """The part of a simulated fleet that its pools call."""

    draw: random.Random
    is_fixed: bool


class Pool:
    """Replicas of one model, their routers and their autoscaler.

    Attributes:
        running: Replicas that take requests, the oldest first.
        starting: Replicas that load their model, with the times at which they will run.
        draining: Replicas that finish what they have.
        queued: Requests that no replica has taken.
        target: Replicas that were decided on last.
        gpu_s: Seconds of GPUs that were held.
    """

    def __init__(self, fleet: World, model: Model, ways: Ways, start: int, most: int) -> None:
        self.fleet, self.model, self.ways, self.most = fleet, model, ways, most
        self.running: dict[str, Engine] = {}
        self.starting: list[tuple[float, Engine]] = []
        self.draining: list[Engine] = []
        self.queued = 0
        self.target = start
        self.gpu_s = 0.0
        self._names = itertools.count()
        self._assigned: list[dict[int, tuple[str, Need, float]]] = [{} for _ in range(ROUTERS)]
        self._drained: list[tuple[float, EngineLoad]] = []
        self._wish: tuple[int, float] | None = None  # the direction of a change, and since when
        self._past: deque[float] = deque(maxlen=2)
        for _ in range(start):
            self._run(self._new(), 0.0)

    @property
    def all(self) -> list[Engine]:
        """All replicas that hold GPUs."""
        return [*self.running.values(), *(each for _, each in self.starting), *self.draining]

    def ask(
        self, lease: Lease, wait_s: float, refused: Callable[[float], None], now: float
    ) -> None:
        """Send a lease to a replica, now or as soon as one takes it; give up after `wait_s`."""
        number, need = lease.request.number, lease.need
        router, until = number % ROUTERS, now + wait_s
        self.queued += 1

        def attempt(now: float) -> None:
            if now >= until:
                self.queued -= 1
                refused(now)
                return
            for name in self._order(router, need, now):
                engine = self.running[name]
                if engine.num_requests < self.model.max_leases:
                    self.queued -= 1
                    self._assigned[router][number] = (name, need, now)
                    engine.submit(lease, now)
                    if not lease.is_open:
                        self.fleet.at(min(now + LOOK_S, until), look)
                    return
            self.fleet.at(now + RETRY_S, attempt)

        def look(now: float) -> None:
            """Give up in time; move to where there is room by now."""
            assert lease.engine is not None
            if lease.is_open:
                return
            if now >= until:
                self._leave(lease, now)
                refused(now)
            elif self.ways.by_room and self._can_move(lease, router, now):
                self._leave(lease, now)
                self.queued += 1
                attempt(now)
            else:
                self.fleet.at(min(now + LOOK_S, until), look)

        attempt(now)

    def forget(self, lease: Lease) -> None:
        """Forget a lease that has ended, as its router does."""
        number = lease.request.number
        self._assigned[number % ROUTERS].pop(number, None)

    def tick(self, now: float) -> None:
        """Run the controller once."""
        for ready_at, engine in [each for each in self.starting if each[0] <= now]:
            self.starting.remove((ready_at, engine))
            self._run(engine, now)
        self.draining = [each for each in self.draining if each.num_requests]
        self.gpu_s += TICK_S * self.model.gpus * len(self.all)
        if not self.fleet.is_fixed and (wanted := self._after_delays(now)) != self.target:
            self._scale(wanted, now)

    def _leave(self, lease: Lease, now: float) -> None:
        assert lease.engine is not None
        lease.engine.withdraw(lease, now)
        self.forget(lease)

    def _order(self, router: int, need: Need, now: float) -> Sequence[str]:
        """Return the replicas to try."""
        if not self.ways.by_room:
            two = self.fleet.draw.sample(list(self.running.values()), min(2, len(self.running)))
            return [each.name for each in sorted(two, key=lambda each: each.num_requests)]
        return rank_candidates(
            need,
            self._candidates(router, now),
            target_ongoing=self.model.target_ongoing,
            first_token_goal_s=GOAL_S,
            draw=self.fleet.draw.sample,
        )

    def _candidates(self, router: int, now: float) -> list[Candidate]:
        """Return the replicas as a router knows them."""
        reports = {each.name: _known(each, now) for each in self.running.values()}
        assigned: dict[str, list[Need]] = {}
        mine = self._assigned[router]
        for number, (name, taken, since) in list(mine.items()):
            report = reports.get(name)
            if name not in reports or (report and since < report.at - LATE_S):
                del mine[number]
            else:
                assigned.setdefault(name, []).append(taken)
        return [
            Candidate(each.name, each.num_requests, reports[each.name], assigned.get(each.name, ()))
            for each in self.running.values()
        ]

    def _can_move(self, lease: Lease, router: int, now: float) -> bool:
        """Return whether a lease waits, as far as its router knows, and would open elsewhere."""
        assert lease.engine is not None
        here = _known(lease.engine, now)
        if not lease.engine.is_draining and not (here and here.leases_waiting):
            return False
        return any(
            has_room(lease.need, each, self.model.target_ongoing)
            for each in self._candidates(router, now)
            if each.replica != lease.engine.name
        )

    def _after_delays(self, now: float) -> int:
        """Return the number of replicas to have, after Serve's delays."""
        wanted = min(max(self._wanted(now), 1), self.most)
        direction = (wanted > self.target) - (wanted < self.target)
        if not direction:
            self._wish = None
            return wanted
        if self._wish is None or self._wish[0] != direction:
            self._wish = (direction, now)
        if now - self._wish[1] < (self.model.up_s if direction > 0 else self.model.down_s):
            return self.target
        self._wish = None
        return wanted

    def _wanted(self, now: float) -> int:
        running = list(self.running.values())
        if not self.ways.by_work:
            self._past.append(self.queued + sum(each.num_requests for each in running))
            return -(-int(statistics.mean(self._past)) // int(self.model.target_ongoing))
        self._drained = [each for each in self._drained if now - each[0] <= self.model.down_s]
        state = PoolState(
            self.target,
            [_load(each) for each in running],
            self.queued,
            [load for _, load in self._drained],
        )
        return engines_wanted(
            state, target_ongoing=self.model.target_ongoing, first_token_goal_s=GOAL_S
        )

    def _scale(self, wanted: int, now: float) -> None:
        """Start replicas, or have some drain: those that start, then the newest, as Serve does."""
        for _ in range(wanted - self.target):
            self.starting.append((now + self.model.start_s, self._new()))
        for _ in range(self.target - wanted):
            if self.starting:
                self.starting.pop()
                continue
            engine = self.running.pop(next(reversed(self.running)))
            engine.is_draining = True
            self.draining.append(engine)
            if load := _load(engine):
                self._drained.append((now, load))
        self.target = wanted

    def _new(self) -> Engine:
        return Engine(self.fleet, self.model, f"{self.model.name}-{next(self._names)}")

    def _run(self, engine: Engine, now: float) -> None:
        """Have a replica take requests, and report from soon after."""

        def report(now: float) -> None:
            engine.report(now)
            if not engine.is_draining:
                self.fleet.at(now + REPORT_S, report)

        self.running[engine.name] = engine
        self.fleet.at(now + self.fleet.draw.random() * REPORT_S, report)


def _known(engine: Engine, now: float) -> EngineReport | None:
    """Return the latest report of a replica that has reached the routers."""
    return next((each for each in reversed(engine.reports) if now - each.at >= LATE_S), None)


def _load(engine: Engine) -> EngineLoad | None:
    """Return the load that a replica reported last."""
    return load_of(vars(engine.reports[-1])) if engine.reports else None
