"""What a draft/verify round costs through Ray when no model computes.

    python benchmarks/rounds.py [--rounds 150] [--repeats 5]

Three ways of passing the same 10 x 64 block from one actor to another and a verdict back, measured
in turn within each repetition, by one loop and by 16 loops at once:

bare      two plain async actors and a loop in a third: the least that Ray can do
loop      the application's own: leases on Serve pools, engine actors, `speculate`, answer's text
request   the same behind the orchestrator, every round's text streamed to a caller

The engines are `tests.fakes.FakeEngine`: real ledgers, scripted tokens. The milliseconds that they
spend on a round outside Ray are reported beside the rest. Asked is: loop / bare <= 1.3, and for 16
loops that or 700 rounds a second in all.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on loopback alone

import ray
from ray import serve

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from cluster.leases import hold  # noqa: E402
from deployments.answers import Answer  # noqa: E402
from deployments.app import compose  # noqa: E402
from deployments.config import ServeConfig  # noqa: E402
from deployments.ray_ports import RayDrafter, RayVerifier  # noqa: E402
from evaluation.circumstances import circumstances  # noqa: E402
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig  # noqa: E402
from rapid.engines.text import ChatText  # noqa: E402
from rapid.messages import (  # noqa: E402
    DraftBlock,
    GenerateRequest,
    LeaseRequest,
    Message,
    SpeculationRequest,
    TextDelta,
    Verdict,
)
from rapid.speculation.loop import speculate  # noqa: E402
from tests.fakes import FakeEngine  # noqa: E402
from tests.ray_cluster import free_port  # noqa: E402

BLOCK, CANDIDATES, CONCURRENT = 10, 64, 16


def block(position: int = 0) -> DraftBlock:
    return DraftBlock(
        lease_id="bare",
        choice=0,
        position=position,
        token_ids=np.arange(BLOCK, dtype=np.int32),
        candidate_ids=np.zeros((BLOCK, CANDIDATES), np.int32),
        candidate_probs=np.zeros((BLOCK, CANDIDATES), np.float32),
    )


@ray.remote(num_cpus=0, max_concurrency=1000)
class Bare:
    """Either end of the bare ping-pong."""

    async def draft(self, verdict: Verdict | None, num_tokens: int) -> DraftBlock:
        return block()

    async def verify(self, drafted: DraftBlock) -> Verdict:
        return Verdict("bare", 0, drafted.position, tuple(range(BLOCK)), BLOCK, BLOCK, False)


@ray.remote(num_cpus=0, max_concurrency=1000)
class Loops:
    """Runs loops side by side and says how long they took."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self._pools = target, drafter
        self._text = ChatText.load("embedded:target")

    async def bare(self, ping: Any, pong: Any, loops: int, rounds: int) -> float:
        async def loop() -> None:
            verdict = None
            for _ in range(rounds):
                verdict = await pong.verify.remote(ping.draft.remote(verdict, BLOCK))

        began = time.perf_counter()
        await asyncio.gather(*(loop() for _ in range(loops)))
        return time.perf_counter() - began

    async def ours(self, loops: int, rounds: int) -> float:
        ready = asyncio.Barrier(loops + 1)

        async def loop(index: int) -> None:
            request = LeaseRequest(
                lease_id=f"{time.time_ns()}-{index}",
                tenant="local",
                prompt_ids=np.arange(100, dtype=np.int32),
                max_tokens=BLOCK * rounds,
                sampling=SamplingConfig(seed=1),
                speculation=SpeculationConfig(),
            )
            take = functools.partial(hold, request=request, timeout_s=30, renew_every_s=5)
            async with take(self._pools[0]) as target, take(self._pools[1]) as drafter:
                answer = Answer(0, self._text, (), BLOCK * rounds)
                verdicts = speculate(
                    RayDrafter(drafter),
                    RayVerifier(target, drafter),
                    max_tokens=BLOCK * rounds,
                    max_draft=BLOCK,
                )
                await ready.wait()
                async for _ in answer.follow(verdicts):
                    pass
                assert answer.statistics.rounds == rounds
                await ready.wait()

        running = [asyncio.create_task(loop(index)) for index in range(loops)]
        await ready.wait()
        began = time.perf_counter()
        await ready.wait()
        took = time.perf_counter() - began
        await asyncio.gather(*running)
        return took


async def requests(orchestrator: Any, loops: int, rounds: int) -> float:
    """Seconds from the first round of any request to the last of all."""
    generate = orchestrator.options(stream=True, method_name="generate", _by_reference=False)
    times: list[float] = []

    async def ask(index: int) -> None:
        request = GenerateRequest(
            f"{time.time_ns()}-{index}",
            "local",
            (Message("user", "Which harbour?"),),
            seed=1,
            max_tokens=BLOCK * rounds,
            speculation=SpeculationRequest(mode="lossless"),
        )
        async for event in generate.remote(request):
            if isinstance(event, TextDelta):
                times.append(time.perf_counter())

    await asyncio.gather(*(ask(index) for index in range(loops)))
    return max(times) - min(times)


async def fake_engine_ms(rounds: int) -> float:
    """What the two fakes spend on a round in process."""
    engine = FakeEngine(EngineConfig(model="fake", kv_cache_tokens=2**20), candidates=CANDIDATES)
    for role in "td":
        await engine.open(
            LeaseRequest(
                role,
                "local",
                np.arange(100, dtype=np.int32),
                BLOCK * rounds,
                SamplingConfig(seed=1),
                SpeculationConfig(),
            )
        )
    verdict = None
    began = time.perf_counter()
    for _ in range(rounds):
        verdict = await engine.verify("t", 0, await engine.draft("d", 0, verdict, BLOCK))
    return 1e3 * (time.perf_counter() - began) / rounds


def configuration(rounds: int) -> ServeConfig:
    room = {"max_context": 200 + BLOCK * rounds, "max_leases": 2 * CONCURRENT}
    room["kv_cache_tokens"] = CONCURRENT * room["max_context"]
    pool = {"max_replicas": 1, "num_cpus": 0.05}
    return ServeConfig.model_validate(
        {
            "target": {"engine": {"model": "embedded:target", **room}, "pool": pool},
            "drafter": {"engine": {"model": "embedded:drafter", **room}, "pool": pool},
            "retriever": {"retrieval": {"budget_tokens": 512}, "pool": pool},
            "orchestrator": {"draft_length": "fixed", "pool": pool},
            "api": {"pool": pool},
        }
    )


def measure(rounds: int, repeats: int) -> dict[str, Any]:
    load = functools.partial(FakeEngine, candidates=CANDIDATES)
    serve.run(compose(configuration(rounds), load, load), name="rounds", route_prefix="/")
    handle = functools.partial(serve.get_deployment_handle, app_name="rounds")
    loops = Loops.remote(handle("Target"), handle("Drafter"))
    ping, pong = Bare.remote(), Bare.remote()
    ways = {
        "bare": lambda n, r: ray.get(loops.bare.remote(ping, pong, n, r)),
        "loop": lambda n, r: ray.get(loops.ours.remote(n, r)),
        "request": lambda n, r: asyncio.run(requests(handle("Orchestrator"), n, r)),
    }
    for run in ways.values():
        run(2, 20)
    report: dict[str, Any] = {}
    for count in (1, CONCURRENT):
        each = rounds if count == 1 else max(20, rounds // 4)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, run in ways.items():
                seconds[way].append(run(count, each))
        ratios = [ours / bare for ours, bare in zip(seconds["loop"], seconds["bare"], strict=True)]
        report[f"{count} loops" if count > 1 else "1 loop"] = {
            "rounds_per_loop": each,
            "round_ms": {
                way: [round(1e3 * s / each, 3) for s in sorted(took)]
                for way, took in seconds.items()
            },
            "rounds_per_s": {
                way: round(count * each / statistics.median(took)) for way, took in seconds.items()
            },
            "loop_over_bare": {
                "median": round(statistics.median(ratios), 3),
                "all": [round(ratio, 3) for ratio in ratios],
            },
        }
    report["fake_engines_ms_per_round"] = round(asyncio.run(fake_engine_ms(2000)), 3)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/rounds.json")
    arguments = parser.parse_args()
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
    report = measure(arguments.rounds, arguments.repeats)
    serve.shutdown()
    ray.shutdown()
    report |= {
        **circumstances(),
        "ray": ray.__version__,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
