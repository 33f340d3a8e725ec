"""Decoding time of `lossless`, with measured draft lengths, against plain decoding.

    python -m benchmarks.decoding.draft_length [--pairs 15] [--tokens 96] [--contexts 512 4000 8000]
        [--cpu-time]

The embedded target decodes greedily in process, past every end-of-sequence token, in interleaved
pairs: plain, and `lossless` with the controller of a server. The ratio is plain's decoding time
over that of `lossless`, for the same tokens; below 1 speculation costs time. The goal is a median
of at least 0.97. All pairs of a drafter share one `RoundCosts`, as all requests of an orchestrator
do. The first pair of all, which pays for the controller's trials, is reported separately.

``--cpu-time`` counts CPU seconds of the process instead, for the controller too. It is meant for a
machine with other load, where single wall times are off by a factor of two.

The drafters are the embedded drafter on the last 300 tokens, prompt lookup, and a synthetic one,
which is free and right at a given rate (its acceptance is made up, and so is its speedup).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.reporting import interval, keep, table
from rapid.checkpoints.text import ChatText
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.embedded.generator import generate_document
from rapid.engines.engine import Engine
from rapid.engines.forward.loading import load_model
from rapid.engines.local_ports import EngineDrafter, EngineVerifier
from rapid.messages import DraftBlock, LeaseRequest, Verdict, as_prompt
from rapid.ports import Clock
from rapid.speculation.controller import Controller
from rapid.speculation.lookup import PromptIndex, PromptLookupDrafter
from rapid.speculation.loop import speculate
from rapid.speculation.round_costs import RoundCosts

MAX_DRAFT = 10
RATES = (0.5, 0.9)


class Oracle:
    """A drafter that knows the answer and proposes each of its tokens with probability `rate`."""

    def __init__(self, answer: Sequence[int], rate: float) -> None:
        self._answer, self._rate, self._position = answer, rate, 0
        self._random = random.Random(0)

    def draft(self, verdict: Verdict | None, num_tokens: int) -> DraftBlock:
        self._position += len(verdict.token_ids) if verdict else 0
        right = self._answer[self._position : self._position + num_tokens]
        ids = [token if self._random.random() < self._rate else token ^ 1 for token in right]
        drafted = np.asarray(ids, dtype=np.int32)
        ones = np.ones((len(ids), 1), np.float32)
        return DraftBlock("oracle", 0, self._position, drafted, drafted[:, None], ones)


def open_engine(role: str, max_context: int, threads: int) -> Engine:
    config = EngineConfig(
        model=f"embedded:{role}",
        max_context=max_context,
        kv_cache_tokens=4 * max_context,
        threads=threads,
    )
    return Engine(replace(load_model(config), eos_ids=frozenset()), config)


async def lease(engine: Engine, lease_id: str, prompt: list[int], num_tokens: int) -> str:
    await engine.open(
        LeaseRequest(
            lease_id,
            "local",
            as_prompt(prompt),
            num_tokens,
            SamplingConfig(temperature=0),
            SpeculationConfig(eta=0, max_draft=MAX_DRAFT),
        )
    )
    await engine.prefill(lease_id)
    return lease_id


async def decode(
    target: Engine,
    prompt: list[int],
    num_tokens: int,
    clock: Clock,
    drafter: Any = None,
    pace: Controller | None = None,
) -> tuple[float, list[Verdict]]:
    """Return the seconds of decoding, without the prefill, and the rounds."""
    held = await lease(target, f"target-{time.time_ns()}", prompt, num_tokens)
    verifier = EngineVerifier(target, held)
    began = clock()
    rounds = speculate(drafter, verifier, max_tokens=num_tokens, max_draft=MAX_DRAFT, pace=pace)
    verdicts = [verdict async for verdict in rounds]
    took = clock() - began
    target.release(held)
    return took, verdicts


async def measure(name: str, context: int, costs: RoundCosts, options: Any) -> dict[str, Any]:
    """Measure interleaved pairs of one drafter at one context length."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    text, num_tokens = ChatText.load("embedded:target"), options.tokens
    document = generate_document(context, 2 * context).text
    prompt = text.encode(document)[:context]
    target = open_engine("target", context + num_tokens + MAX_DRAFT, options.threads)
    helper = open_engine("drafter", 300 + num_tokens + MAX_DRAFT, options.threads)
    _, plainly = await decode(target, prompt, num_tokens, clock)
    answer = [token for verdict in plainly for token in verdict.token_ids]
    ratios, rounds, drafted = [], 0, 0
    for pair in range(options.pairs + 1):
        took: dict[str, float] = {}
        for way in ("plain", "lossless") if pair % 2 else ("lossless", "plain"):
            if way == "plain":
                took[way], _ = await decode(target, prompt, num_tokens, clock)
                continue
            held = None
            if name == "embedded drafter":
                held = await lease(helper, f"draft-{pair}", prompt[-300:], num_tokens)
                drafter: Any = EngineDrafter(helper, held)
            elif name == "prompt lookup":
                drafter = PromptLookupDrafter(PromptIndex(prompt))
            else:
                drafter = Oracle(answer, float(name.split()[-1]))
            pace = Controller(costs, len(prompt), MAX_DRAFT, can_rest=True, clock=clock)
            took[way], verdicts = await decode(target, prompt, num_tokens, clock, drafter, pace)
            assert [token for v in verdicts for token in v.token_ids] == answer
            rounds += len(verdicts)
            drafted += sum(verdict.num_drafted > 0 for verdict in verdicts)
            if held is not None:
                helper.release(held)
        ratios.append(took["plain"] / took["lossless"])
    target.close()
    helper.close()
    first, *rest = ratios
    low, high = interval(rest)
    return {
        "drafter": name,
        "context": context,
        "plain_ms_per_token": round(1e3 * took["plain"] / num_tokens, 3),
        "first_pair": round(first, 3),
        "median": round(statistics.median(rest), 3),
        "interval_95": [round(low, 3), round(high, 3)],
        "drafted_rounds": f"{drafted} of {rounds}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4000, 8000])
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ("embedded drafter", "prompt lookup", *(f"synthetic {rate}" for rate in RATES)):
        costs = RoundCosts()
        for context in options.contexts:
            row = asyncio.run(measure(name, context, costs, options))
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    title = "Measured draft lengths against plain decoding: plain's time by that of lossless"
    text = table([key.replace("_", " ") for key in rows[0]], [list(row.values()) for row in rows])
    keep("draft_length", title, text, {"settings": vars(options), "cases": rows})


if __name__ == "__main__":
    main()
