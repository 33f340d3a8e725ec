"""The cost of a draft/verify round through Ray, by where each millisecond goes.

    python -m benchmarks.serving.rounds [--rounds 150] [--repeats 5]

The benchmark passes the same 10 x 64 block from one actor to another and a verdict back in several
ways, measured in turn within each repetition, by one loop and by 16 loops at once:

empty     two plain async actors and a loop in a third, blocks without content: the calls alone
bare      the same with the block: the least that Ray can do
shared    as bare, but each call serves four loops, which go on in step: what sharing could save
apart     leases on Serve pools, engine actors, `speculate`, answer's text; each call by itself
loop      the same, with calls that several loops make at the same moment in one, as applications do
request   the same behind the orchestrator, with the text streamed to a caller
answer    the same for a caller who reads the text when it is complete

The rounds of request and answer are told from the opening of requests by asking for answers of
two lengths. The engines are `tests.fakes.FakeEngine`, with real ledgers and scripted tokens. The
milliseconds that they spend on a round outside Ray are reported too. Then the embedded models
answer questions by one loop over leases of the application of `serve_config.yaml`, and its rounds
are divided into the engines' reported times and the rest, by the differences above. The goal is
that neither loop nor request takes more than 1.3 of bare.

It takes about 3 minutes on two cores, with `--quick` one.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on loopback only

import ray
from ray import serve

from benchmarks.decoding.embedded_prompts import prompts
from benchmarks.reporting import ROOT, keep, shown, table
from benchmarks.serving.round_loops import (
    BLOCK,
    CANDIDATES,
    CONCURRENT,
    Bare,
    Loops,
    fake_engine_ms,
    requests,
)
from deployments.app import compose
from deployments.config.serve_config import ServeConfig
from deployments.pools.engine_actor import load_engine
from tests.fakes import FakeEngine
from tests.ports import free_port


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
        "shared": lambda n, r: ray.get(loops.shared.remote(ping, pong, n, r)),
        "apart": lambda n, r: ray.get(loops.ours.remote(n, r, is_shared=False)),
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
        ratios = {
            way: [ours / bare for ours, bare in zip(seconds[way], seconds["bare"], strict=True)]
            for way in ("shared", "apart", "loop", "request")
        }
        report[f"{count} loops" if count > 1 else "1 loop"] = {
            "rounds_per_loop": each,
            "round_ms": {
                way: [round(1e3 * s / each, 3) for s in sorted(took)]
                for way, took in seconds.items()
            },
            "rounds_per_s": {
                way: round(count * each / statistics.median(took)) for way, took in seconds.items()
            },
            "over_bare": {
                way: {
                    "median": round(statistics.median(all_), 3),
                    "all": [round(ratio, 3) for ratio in all_],
                }
                for way, all_ in ratios.items()
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
        ratios = map(shown, found["over_bare"].values())
        rows.append([count, *times, *ratios, found["rounds_per_s"]["request"]])
    header = ["round, ms", *ways, *(f"{way} / bare" for way in report["1 loop"]["over_bare"])]
    header.append("rounds/s, request")
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
