"""A fleet of targets and drafters in simulation: our routing and scaling against Serve's defaults.

    python -m benchmarks.fleet.fleet [--seconds 600] [--seeds 3]

A discrete-event simulation without Ray. Requests arrive in bursts and ask about documents whose
popularity follows Zipf's law. Every request takes a lease on a target, is read there, takes a lease
on a drafter if it can, and is answered. Where a lease goes is decided by
`cluster.routing.rank_candidates`, and how many replicas there are by
`cluster.autoscaling.engines_wanted`: the functions that serve. Reports reach the routers as late as
in a service, engines read and evict as `rapid.engines` does (`fleet_engines.py`), and the pools
have the targets and delays of the shipped configuration. What is compared with ours are Serve's
ways, with the same settings: the less busy of two random replicas by exact numbers, and scaling by
ongoing requests.

**Times are rooflines, not measurements**: `rapid.planning` for Llama-3.1-8B on an H100 and 70B on
four, with a speedup by drafts that is assumed (`SPEEDUP`). So ratios between the policies mean
something, seconds do not. Left out: retrieval, the network, drafters' steps, more than one tenant,
pages that are evicted for the sake of one run.

It takes two minutes of CPU time, with `--quick` ten seconds.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet.fleet_engines import Engine, Lease
from benchmarks.fleet.fleet_pools import GOAL_S, OURS, SERVE, TICK_S, Pool, Ways
from benchmarks.fleet.fleet_traces import PAGE, QUESTION, Model, Request, trace
from benchmarks.reporting import keep, settings, shown, spread, table
from cluster.routing import Need

TARGET = Model("llama-3.1-8b", 1, 60.0, target_ongoing=3, up_s=10.0, down_s=300.0)
DRAFTER = Model("llama-3.1-70b", 4, 180.0, target_ongoing=12, up_s=30.0, down_s=900.0)
"""The pools' settings in `cluster/configs/llama-3.1-8b-with-70b-drafter.yaml`."""
STARTS = {"all from the start": 1.0, "half, then scaled": 0.5, "a tenth, then scaled": 0.1}
SPEEDUP = 1.8  # of a drafted answer over a plain one, assumed
SHORT = 4500  # tokens of a drafter's prompt
TARGET_WAIT_S, DRAFTER_WAIT_S = 30.0, 5.0  # longest waits for a lease


class Fleet:
    """Pools of targets and drafters that answer a trace.

    Attributes:
        first_tokens: Seconds to the first token of each request that was answered.
        refused: Number of requests without a lease in time (503).
        plain: Number of answers without a drafter.
        asked_tokens: Prompt tokens of the leases that targets opened.
        target_tokens: Those that targets read, as they did not hold them.
        ideal_tokens: Those that one cache as large as all running targets' together would read.
    """

    def __init__(self, ways: Ways, targets: int, drafters: int, *, start: float, seed: int) -> None:
        """Store the settings.

        Args:
            ways: How requests are routed and pools scaled.
            targets: Most replicas of the target's pool.
            drafters: Most replicas of the drafter's pool.
            start: Share of them that runs from the start; with 1 the pools do not scale.
            seed: Seed of the routers' and the replicas' chance.
        """
        self.draw = random.Random(seed)
        self.is_fixed = start == 1
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = itertools.count()
        self.first_tokens: list[float] = []
        self.refused = self.plain = 0
        self.ideal_tokens = self.target_tokens = self.asked_tokens = 0
        self.cached: OrderedDict[str, int] = OrderedDict()
        self.target = Pool(self, TARGET, ways, max(int(start * targets), 1), targets)
        self.drafter = Pool(self, DRAFTER, ways, max(int(start * drafters), 1), drafters)

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
        self.asked_tokens += need.prompt_tokens
        known = self.cached.pop(need.document, 0)
        self.ideal_tokens += need.prompt_tokens - known
        self.cached[need.document] = need.prompt_tokens - QUESTION
        over = sum(self.cached.values()) - len(self.target.running) * engine.model.pages * PAGE
        while over > 0:
            name, tokens = self.cached.popitem(last=False)
            if tokens > over:
                self.cached[name] = tokens - over
                self.cached.move_to_end(name, last=False)
            over -= tokens

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
            verifying.engine.answer(verifying, steps, done, now)

        def done(now: float) -> None:
            is_done.append(True)
            verifying.release(now)
            self.target.forget(verifying)
            if drafting.is_open:
                drafting.release(now)
                self.drafter.forget(drafting)

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
    read: float  # share of the prompts' tokens that were read, not found
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
            fleet.target_tokens / fleet.asked_tokens,
            fleet.target_tokens / fleet.ideal_tokens,
            (fleet.target.gpu_s + fleet.drafter.gpu_s) / 3600,
        )


def simulate(
    ways: Ways, requests: Sequence[Request], targets: int, drafters: int, *, start: float
) -> Outcome:
    """Return what one fleet makes of a trace."""
    fleet = Fleet(ways, targets, drafters, start=start, seed=1)
    fleet.run(requests)
    return Outcome.of(fleet)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate every way, from every start, on each seed's trace."""
    report: dict[str, Any] = {}
    for kind, start in STARTS.items():
        for ways in (SERVE, OURS):
            outcomes = [outcome(ways, options, seed, start) for seed in range(options.seeds)]
            report.setdefault(kind, {})[ways.name] = {
                name: spread([getattr(each, name) for each in outcomes])
                for name in Outcome.__dataclass_fields__
            }
    return report


def outcome(ways: Ways, options: argparse.Namespace, seed: int, start: float) -> Outcome:
    """Return what one fleet makes of the trace of a seed."""
    requests = trace(options.seconds, options.rate, options.documents, seed)
    return simulate(ways, requests, options.targets, options.drafters, start=start)


def told(report: dict[str, Any]) -> str:
    """Return the table."""
    header = ["replicas", "", "first token in time", "503", "plain", "read", "read / ideal"]
    header += ["GPU-hours"]
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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed of three minutes")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.seeds = 180, 1
    report = measure(options)
    name = None if options.quick else "fleet"
    keep(name, "A fleet in simulation", told(report), {"settings": settings(options)} | report)


if __name__ == "__main__":
    main()
