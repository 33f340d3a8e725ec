"""The cost of a long prefill for decoding leases, with and without the bound on it.

    python -m benchmarks.engine.scheduling [--prompt 4096] [--repeats 7] [--quick]

Two leases decode on one engine, token by token. In turn within each repetition, they decode beside
the prefill of a long prompt bounded by `prefill_slowdown` 2 and 4, and beside one bounded by the
token budget of a step alone. The model is a random-weight Llama of 4 layers x 256 in float32, with
one thread. The results are the leases' seconds per token (the mean over the prefill, and the
slowest), as ratios to theirs just before and just after it (the answers grow meanwhile, and so does
the cost of a token), and the time of the prefill, as a ratio to a prefill that has the engine for
itself.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.random_checkpoint import save_random_llama
from benchmarks.reporting import keep, ratios, shown, spread, table
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.weights.loading import load_model
from rapid.messages import LeaseRequest, Terms, as_prompt

VOCAB, STEP_TOKENS = 1024, 512
OTHERS, OTHERS_PROMPT, OTHERS_TOKENS, TOKENS_ALONE = ("one", "two"), 256, 4000, 200
SLOWDOWNS = {"2": 2.0, "4": 4.0, "unbounded": 1e9}
RANDOM = np.random.default_rng(0)  # prompts differ, so that none is found in the cache


def lease(lease_id: str, num_prompt: int, max_tokens: int) -> LeaseRequest:
    return LeaseRequest(
        lease_id,
        Terms(lease_id, SamplingConfig(temperature=0), SpeculationConfig(), max_tokens),
        as_prompt(RANDOM.integers(4, VOCAB, num_prompt).tolist()),
    )


async def decode(engine: Engine, until: asyncio.Event | None = None) -> list[float]:
    """Return the seconds of the others' tokens, until the event or for a fixed number of tokens."""

    async def one(lease_id: str) -> list[float]:
        seconds: list[float] = []
        while not until.is_set() if until else len(seconds) < TOKENS_ALONE:
            began = time.perf_counter()
            await engine.decode(lease_id, 0, 1)
            seconds.append(time.perf_counter() - began)
        return seconds

    return [each for seconds in await asyncio.gather(*map(one, OTHERS)) for each in seconds]


async def prefill(engine: Engine, num_tokens: int) -> float:
    """Return the seconds of one prefill."""
    await engine.open(lease("long", num_tokens, 8))
    began = time.perf_counter()
    await engine.prefill("long")
    took = time.perf_counter() - began
    engine.release("long")
    return took


async def beside(engine: Engine, num_tokens: int) -> tuple[list[float], list[float], float]:
    """Return the others' seconds per token, alone and beside a prefill, and the prefill's."""
    for name in OTHERS:
        await engine.open(lease(name, OTHERS_PROMPT, OTHERS_TOKENS))
        await engine.prefill(name)
        await engine.decode(name, 0, 8)
    before = await decode(engine)
    until = asyncio.Event()
    decoding = asyncio.ensure_future(decode(engine, until))
    took = await prefill(engine, num_tokens)
    until.set()
    seconds = await decoding
    after = await decode(engine)
    for name in OTHERS:
        engine.release(name)
    return before + after, seconds, took


async def measure(engines: dict[str, Engine], prompt: int, repeats: int) -> dict[str, Any]:
    """Measure everything in turn, after one repetition that does not count."""
    alone: dict[str, list[float]] = {name: [] for name in engines}
    mean: dict[str, list[float]] = {name: [] for name in engines}
    slowest: dict[str, list[float]] = {name: [] for name in engines}
    took: dict[str, list[float]] = {name: [] for name in engines}
    took_alone: list[float] = []
    for repeat in range(repeats + 1):
        prefill_alone_s = await prefill(next(iter(engines.values())), prompt)
        if repeat:
            took_alone.append(prefill_alone_s)
        for name, engine in engines.items():
            seconds_alone, seconds, prefill_s = await beside(engine, prompt)
            if repeat:
                alone[name].append(1e3 * statistics.fmean(seconds_alone))
                mean[name].append(1e3 * statistics.fmean(seconds))
                slowest[name].append(1e3 * max(seconds))
                took[name].append(prefill_s)
    return {
        name: {
            "ms_per_token_alone": spread(alone[name]),
            "ms_per_token": spread(mean[name]),
            "slowest_token_ms": spread(slowest[name], 1),
            "prefill_s": spread(took[name]),
            "per_token_over_alone": ratios(mean[name], alone[name]),
            "prefill_over_alone": ratios(took[name], took_alone),
        }
        for name in engines
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="2K, three repetitions, nothing kept")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompt, arguments.repeats = 2048, 3
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(
            Path(folder), hidden_size=256, num_layers=4, num_heads=4, vocab_size=VOCAB
        )
        max_context = max(arguments.prompt + 64, OTHERS_PROMPT + OTHERS_TOKENS)
        config = EngineConfig(
            model=folder,
            dtype="float32",
            device="cpu",
            threads=1,
            step_tokens=STEP_TOKENS,
            max_context=max_context,
            kv_cache_tokens=max_context + 2 * (OTHERS_PROMPT + OTHERS_TOKENS + 64),
        )
        loaded = load_model(config)
        engines = {
            name: Engine(loaded, config.model_copy(update={"prefill_slowdown": slowdown}))
            for name, slowdown in SLOWDOWNS.items()
        }
        cases = asyncio.run(measure(engines, arguments.prompt, arguments.repeats))
        for engine in engines.values():
            engine.close()
    rows = [
        [
            name,
            shown(case["ms_per_token_alone"]),
            shown(case["ms_per_token"]),
            shown(case["per_token_over_alone"]),
            shown(case["slowest_token_ms"], 0),
            shown(case["prefill_s"]),
            shown(case["prefill_over_alone"]),
        ]
        for name, case in cases.items()
    ]
    header = ["bound", "alone ms/token", "beside", "/ alone", "slowest ms", "prefill s", "/ alone"]
    settings = {
        "prompt_tokens": arguments.prompt,
        "others": len(OTHERS),
        "step_tokens": STEP_TOKENS,
        "threads": 1,
        "repeats": arguments.repeats,
    }
    title = f"Others' time per token beside a prefill of {arguments.prompt} tokens"
    keep(
        None if arguments.quick else "scheduling",
        title,
        table(header, rows),
        {"settings": settings, "cases": cases},
    )


if __name__ == "__main__":
    main()
