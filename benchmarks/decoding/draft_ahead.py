"""Gain of drafting ahead on this CPU: the same answers with it on and off, in turn.

    python -m benchmarks.decoding.draft_ahead [--questions 12] [--repeats 2]

The embedded target (1,500-token documents) and drafter decode greedily at eta 0, with one thread
each, in two arrangements:

threads    two engines in one process, which share Python's lock
processes  an engine actor each, and the application's own ports over Ray

Questions are answered one at a time and four at once, with the drafter's `draft_ahead` off and on,
in an order that changes from pair to pair; both must give the same tokens. The results are, by
block length, seconds on / off (ratio of totals with its 95 % interval, and the median pair), the
share of calls for a block that found it ready, and the acceptance rate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on loopback only

import ray

from benchmarks.decoding.embedded_prompts import prompts
from benchmarks.reporting import keep, table
from cluster.leases import HeldLease
from deployments.orchestrator.ray_verifiers import Patience, RayDrafter, RayVerifier
from deployments.pools.engine_actor import EngineActor
from evaluation.reports.estimates import ratio
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.loading import load_model
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.messages import LeaseRequest, as_prompt
from rapid.speculation.loop import speculate
from rapid.speculation.statistics import RoundStatistics

DOCUMENT_TOKENS, MAX_TOKENS, BLOCKS, AT_ONCE = 1500, 48, (4, 10), (1, 4)

Prompts = tuple[list[int], list[int]]
NUMBERS = itertools.count()  # an engine actor takes no lease name twice


@dataclass(frozen=True)
class Place:
    """An arrangement of three engines, with the way to call them and the loop's ports."""

    target: Any
    drafters: dict[bool, Any]  # keyed by whether they draft ahead
    call: Callable[..., Any]
    drafter_port: Callable[[Any, str], Any]
    verifier_port: Callable[[Any, Any, str], Any]


def config(role: str, *, draft_ahead: bool = False) -> EngineConfig:
    return EngineConfig(
        model=f"embedded:{role}",
        device="cpu",
        threads=1,
        max_context=2560,
        kv_cache_tokens=4 * 2560,
        draft_ahead=draft_ahead,
    )


def in_threads() -> Place:
    target, drafter = (load_model(config(role)) for role in ("target", "drafter"))

    async def call(engine: Engine, method: str, *args: object) -> Any:
        answer = getattr(engine, method)(*args)
        return await answer if asyncio.iscoroutine(answer) else answer

    return Place(
        Engine(target, config("target")),
        {on: Engine(drafter, config("drafter", draft_ahead=on)) for on in (False, True)},
        call,
        EngineDrafter,
        lambda target, _, lease_id: EngineVerifier(target, lease_id),
    )


def in_processes() -> Place:
    actor = ray.remote(EngineActor).options(num_cpus=0, max_concurrency=1000)

    async def call(engine: Any, method: str, *args: object) -> Any:
        return await getattr(engine, method).remote(*args)

    return Place(
        actor.remote(config("target")),
        {on: actor.remote(config("drafter", draft_ahead=on)) for on in (False, True)},
        call,
        lambda engine, lease_id: RayDrafter(HeldLease(lease_id, engine, 0.0)),
        lambda target, drafter, lease_id: RayVerifier(
            HeldLease(lease_id, target, 0.0), lambda: None, Patience(30)
        ),
    )


async def answer(
    place: Place, asked: Sequence[Prompts], max_draft: int, *, draft_ahead: bool
) -> tuple[float, list[RoundStatistics]]:
    """Return the seconds of the rounds of some answers at once, without their prefill."""
    drafter = place.drafters[draft_ahead]
    settings = SamplingConfig(temperature=0), SpeculationConfig(eta=0.0, max_draft=max_draft)
    leases = {f"answer-{next(NUMBERS)}": RoundStatistics() for _ in asked}
    for lease_id, both in zip(leases, asked, strict=True):
        for engine, prompt in zip((place.target, drafter), both, strict=True):
            request = LeaseRequest(lease_id, "local", as_prompt(prompt), MAX_TOKENS, *settings)
            await place.call(engine, "open", request)
            await place.call(engine, "prefill", lease_id)

    async def rounds(lease_id: str, made: RoundStatistics) -> None:
        async for verdict in speculate(
            place.drafter_port(drafter, lease_id),
            place.verifier_port(place.target, drafter, lease_id),
            max_tokens=MAX_TOKENS,
            max_draft=max_draft,
        ):
            made.observe(verdict)

    began = time.perf_counter()
    await asyncio.gather(*(rounds(*lease) for lease in leases.items()))
    took = time.perf_counter() - began
    for lease_id in leases:
        for engine in (place.target, drafter):
            await place.call(engine, "release", lease_id)
    return took, list(leases.values())


async def compare(
    place: Place, asked: Sequence[Prompts], at_once: int, max_draft: int, repeats: int
) -> dict[str, Any]:
    groups = [asked[first : first + at_once] for first in range(0, len(asked), at_once)]
    for on in (False, True):
        await answer(place, groups[0], max_draft, draft_ahead=on)
    before = await place.call(place.drafters[True], "status")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    counted: list[RoundStatistics] = []
    for repeat in range(repeats):
        for index, group in enumerate(groups):
            tokens = {}
            for on in (False, True) if (repeat + index) % 2 else (True, False):
                took, made = await answer(place, group, max_draft, draft_ahead=on)
                seconds[on].append(took)
                tokens[on] = [one.token_ids for one in made]
            assert tokens[True] == tokens[False]
            counted += made
    after = await place.call(place.drafters[True], "status")
    hits = after.ahead_hits - before.ahead_hits
    misses = after.ahead_misses - before.ahead_misses
    num_tokens = sum(len(one.token_ids) for one in counted)
    total = ratio(seconds[True], seconds[False])
    pairs = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "max_draft": max_draft,
        "at_once": at_once,
        "pairs": len(pairs),
        "tokens": num_tokens,
        "ms_per_token_off": round(1e3 * sum(seconds[False]) / num_tokens, 3),
        "on_over_off": {
            "of_totals": round(total.value, 3),
            "interval_95": [round(total.low, 3), round(total.high, 3)],
            "median": round(statistics.median(pairs), 3),
            "all": [round(pair, 3) for pair in pairs],
        },
        "hits": hits,
        "misses": misses,
        "rounds": sum(one.rounds for one in counted),
        "acceptance_rate": round(
            sum(one.accepted for one in counted) / sum(one.drafted for one in counted), 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    asked = [prompts(f"ahead-{seed}", DOCUMENT_TOKENS) for seed in range(arguments.questions)]
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    cases, rows = [], []
    for name, make in (("threads", in_threads), ("processes", in_processes)):
        place = make()
        for at_once in AT_ONCE:
            for max_draft in BLOCKS:
                case = asyncio.run(compare(place, asked, at_once, max_draft, arguments.repeats))
                cases.append({"where": name, **case})
                over, found = case["on_over_off"], case["hits"] + case["misses"]
                low, high = over["interval_95"]
                print(cases[-1])
                rows.append(
                    [
                        name,
                        at_once,
                        max_draft,
                        f"{over['of_totals']:.2f} ({low:.2f}-{high:.2f})",
                        f"{over['median']:.2f}",
                        f"{case['ms_per_token_off']:.2f}",
                        f"{case['hits'] / max(found, 1):.2f} of {found}",
                        f"{case['acceptance_rate']:.2f}",
                    ]
                )
    ray.shutdown()
    header = [
        "engines in",
        "at once",
        "K",
        "on / off",
        "median",
        "ms/token off",
        "hits",
        "accepted",
    ]
    settings = {
        "document_tokens": DOCUMENT_TOKENS,
        "max_tokens": MAX_TOKENS,
        "questions": arguments.questions,
        "repeats": arguments.repeats,
        "threads": 1,
    }
    title = "Drafting ahead on a CPU: the embedded models, greedy, eta 0"
    keep("draft_ahead", title, table(header, rows), {"settings": settings, "cases": cases})


if __name__ == "__main__":
    main()
