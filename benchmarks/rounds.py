"""The cost of a draft/verify round through Ray, by where each millisecond goes.

    python benchmarks/rounds.py [--rounds 150] [--repeats 5]

The benchmark passes the same 10 x 64 block from one actor to another and a verdict back in several
ways, measured in turn within each repetition, by one loop and by 16 loops at once:

empty     two plain async actors and a loop in a third, blocks without content: the calls alone
bare      the same with the block: the least that Ray can do
loop      the application's own: leases on Serve pools, engine actors, `speculate`, answer's text
request   the same behind the orchestrator, with every round's text streamed to a caller
answer    the same for a caller who reads the text when it is complete

The engines are `tests.fakes.FakeEngine`, with real ledgers and scripted tokens. The milliseconds
that they spend on a round outside Ray are reported too. Then the embedded models answer questions
by one loop over leases of the application of `serve_config.yaml`, and its rounds are divided into
the engines' reported times and the rest, by the differences above. The goal is loop / bare <= 1.3,
and for 16 loops that or 700 rounds a second in all.

It takes about 3 minutes on two cores, with `--quick` one.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on loopback only

import ray
from ray import serve

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from embedded_prompts import prompts  # noqa: E402
from reporting import keep, shown, table  # noqa: E402

from cluster.leases import hold  # noqa: E402
from deployments.app import compose  # noqa: E402
from deployments.config.serve_config import ServeConfig  # noqa: E402
from deployments.orchestrator.ray_verifiers import Patience, RayDrafter, RayVerifier  # noqa: E402
from deployments.pools.engine_actor import load_engine  # noqa: E402
from rapid.answering.answers import GrowingAnswer  # noqa: E402
from rapid.checkpoints.text import ChatText  # noqa: E402
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig  # noqa: E402
from rapid.messages import (  # noqa: E402
    DraftBlock,
    GenerateRequest,
    LeaseRequest,
    Message,
    SpeculationRequest,
    Verdict,
    as_prompt,
)
from rapid.speculation.loop import speculate  # noqa: E402
from tests.fakes import FakeEngine  # noqa: E402
from tests.ray_cluster import free_port  # noqa: E402

BLOCK, CANDIDATES, CONCURRENT = 10, 64, 16


def block(num_tokens: int = BLOCK) -> DraftBlock:
    return DraftBlock(
        lease_id="bare",
        choice=0,
        position=0,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        candidate_ids=np.zeros((num_tokens, CANDIDATES), np.int32),
        candidate_probs=np.zeros((num_tokens, CANDIDATES), np.float32),
    )


@ray.remote(num_cpus=0, max_concurrency=1000)
class Bare:
    """An actor at either end of the bare ping-pong."""

    async def draft(self, verdict: Verdict | None, num_tokens: int) -> DraftBlock:
        return block(num_tokens)

    async def verify(self, drafted: DraftBlock) -> Verdict:
        return Verdict("bare", 0, drafted.position, tuple(range(BLOCK)), BLOCK, BLOCK, False)


@ray.remote(num_cpus=0, max_concurrency=1000)
class Loops:
    """An actor that runs loops side by side and times them."""

    def __init__(self, target: Any, drafter: Any) -> None:
        self._pools = target, drafter
        self._text = ChatText.load("embedded:target")

    async def bare(self, ping: Any, pong: Any, length: int, loops: int, rounds: int) -> float:
        async def loop() -> None:
            verdict = None
            for _ in range(rounds):
                verdict = await pong.verify.remote(ping.draft.remote(verdict, length))

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
                answer = GrowingAnswer(0, self._text, (), BLOCK * rounds)
                verdicts = speculate(
                    RayDrafter(drafter),
                    RayVerifier(target, lambda: drafter, Patience(30)),
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

    async def answers(
        self, target: Any, drafter: Any, asked: list[tuple[list[int], list[int]]]
    ) -> dict[str, float]:
        """Return the milliseconds of all rounds over engines that compute, and the engines' times.

        Args:
            asked: Pairs of prompts, for target and drafter.
        """
        totals = dict.fromkeys(("ms", "rounds", "draft_ms", "verify_ms"), 0.0)
        speculation = SpeculationConfig(eta=0, max_draft=BLOCK)
        for long, short in asked:
            requests = [
                LeaseRequest(
                    lease_id=f"{time.time_ns()}",
                    tenant="local",
                    prompt_ids=as_prompt(ids),
                    max_tokens=64,
                    sampling=SamplingConfig(seed=1),
                    speculation=speculation,
                )
                for ids in (long, short)
            ]
            take = functools.partial(hold, timeout_s=30, renew_every_s=5)
            async with take(target, requests[0]) as reader, take(drafter, requests[1]) as other:
                for lease in (reader, other):
                    await lease.engine.prefill.remote(lease.lease_id)
                answer = GrowingAnswer(0, self._text, (), 64)
                rounds = speculate(
                    RayDrafter(other),
                    RayVerifier(reader, lambda: other, Patience(30)),
                    max_tokens=64,
                    max_draft=BLOCK,
                )
                began = time.perf_counter()
                async for _ in answer.follow(rounds):
                    pass
                totals["ms"] += 1e3 * (time.perf_counter() - began)
            totals["rounds"] += answer.statistics.rounds
            totals["draft_ms"] += answer.statistics.draft_ms
            totals["verify_ms"] += answer.statistics.verify_ms
        return totals


async def requests(orchestrator: Any, method: str, loops: int, rounds: int) -> float:
    """Return the seconds of so many rounds of all requests, without opening them.

    That is the difference between answers of twice as many rounds and of as many.
    """
    generate = orchestrator.options(stream=True, method_name=method, _by_reference=False)

    async def ask(index: int, num_tokens: int) -> None:
        request = GenerateRequest(
            f"{time.time_ns()}-{index}",
            "local",
            (Message("user", "Which harbour?"),),
            seed=1,
            max_tokens=num_tokens,
            is_streamed=method == "generate",
            speculation=SpeculationRequest(mode="lossless"),
        )
        async for _ in generate.remote(request):
            pass

    async def seconds(rounds: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(ask(index, BLOCK * rounds) for index in range(loops)))
        return time.perf_counter() - began

    return await seconds(2 * rounds) - await seconds(rounds)


async def fake_engine_ms(rounds: int) -> float:
    """Return the milliseconds that the two fakes spend on a round in process."""
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
    room = {"max_context": 200 + 2 * BLOCK * rounds, "max_leases": 2 * CONCURRENT}
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


def embedded() -> ServeConfig:
    """Return the application of `serve_config.yaml` with one replica per pool."""
    written = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    arguments = written["applications"][0]["args"]
    for part in ("target", "drafter"):
        arguments[part]["pool"]["max_replicas"] = 1
    return ServeConfig.model_validate(arguments)


def parts(
    medians: dict[str, float], fakes_ms: float, answered: list[dict[str, float]]
) -> dict[str, Any]:
    """Return the milliseconds of a round over engines that compute, by part.

    Args:
        medians: Medians of one loop's round, by way.
        answered: Results of each repetition (`Loops.answers`).
    """

    def a_round(what: str) -> float:
        return statistics.median(run[what] / run["rounds"] for run in answered)

    found = {
        "the drafter computes": a_round("draft_ms"),
        "the target computes and judges": a_round("verify_ms"),
        "two actor calls": medians["empty"],
        "the block's way between the actors": medians["bare"] - medians["empty"],
        "loop, leased engines, text": medians["loop"] - medians["bare"] - fakes_ms,
    }
    found["not told apart"] = a_round("ms") - sum(found.values())
    found["a round in all"] = a_round("ms")
    found["and the orchestrator's stream to its caller"] = medians["request"] - medians["loop"]
    return {name: round(value, 3) for name, value in found.items()}


@contextmanager
def local_serve() -> Iterator[None]:
    """Start a Ray of this script's own, on loopback."""
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def measure(rounds: int, repeats: int, answers: int) -> dict[str, Any]:
    load = functools.partial(FakeEngine, candidates=CANDIDATES)
    serve.run(compose(configuration(rounds), load, load), name="rounds", route_prefix="/")
    handle = functools.partial(serve.get_deployment_handle, app_name="rounds")
    loops = Loops.remote(handle("Target"), handle("Drafter"))
    ping, pong = Bare.remote(), Bare.remote()
    ways = {
        "empty": lambda n, r: ray.get(loops.bare.remote(ping, pong, 0, n, r)),
        "bare": lambda n, r: ray.get(loops.bare.remote(ping, pong, BLOCK, n, r)),
        "loop": lambda n, r: ray.get(loops.ours.remote(n, r)),
        "request": lambda n, r: asyncio.run(requests(handle("Orchestrator"), "generate", n, r)),
        "answer": lambda n, r: asyncio.run(requests(handle("Orchestrator"), "answer", n, r)),
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
    fakes_ms = report["fake_engines_ms_per_round"] = round(asyncio.run(fake_engine_ms(2000)), 3)
    serve.delete("rounds")
    serve.run(compose(embedded(), load_engine, load_engine), name="embedded", route_prefix="/")
    pools = [serve.get_deployment_handle(name, "embedded") for name in ("Target", "Drafter")]
    asked = [prompts(f"rounds {seed}", 1000) for seed in range(answers)]
    ray.get(loops.answers.remote(*pools, asked[:2]))
    answered = [ray.get(loops.answers.remote(*pools, asked)) for _ in range(repeats)]
    medians = {way: statistics.median(took) for way, took in report["1 loop"]["round_ms"].items()}
    report["parts_of_a_round_ms"] = parts(medians, fakes_ms, answered)
    return report


def told(report: dict[str, Any]) -> str:
    """Return the tables."""
    ways = list(report["1 loop"]["round_ms"])
    rows = []
    for count in ("1 loop", f"{CONCURRENT} loops"):
        found = report[count]
        times = (
            shown({"median": statistics.median(t), "all": t}) for t in found["round_ms"].values()
        )
        rows.append([count, *times, shown(found["loop_over_bare"]), found["rounds_per_s"]["loop"]])
    header = ["round, ms", *ways, "loop / bare", "rounds/s, loop"]
    by_part = report["parts_of_a_round_ms"].items()
    return (
        table(header, rows) + "\n" + table(["a round of the embedded models", "ms"], list(by_part))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="three repetitions of 50 rounds")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.repeats = 50, 3
    with local_serve():
        report = measure(arguments.rounds, arguments.repeats, answers=4 if arguments.quick else 12)
    name = None if arguments.quick else "rounds"
    keep(name, "Rounds through Ray", told(report), report | {"ray": ray.__version__})


if __name__ == "__main__":
    main()
