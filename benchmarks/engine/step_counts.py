"""What a step draws and judges on CUDA, counted on a CPU, and what a witness adds to a round.

Operations of torch and launches of our kernels are counted with the kernels interpreted. A round
verifies a block on an engine whose forward sleeps for 100 ms, with one loop and with six.

    python -m benchmarks.engine.step_counts
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from statistics import median
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import torch

from benchmarks.reporting import table
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.engines.engine import Engine
from rapid.messages import DraftBlock
from rapid.speculation.draw import Draw
from rapid.speculation.fast import row_kernels
from rapid.speculation.fast.step import answer_together
from rapid.speculation.questions import Question, ToDecode
from tests.rapid.speculation.drafted import blocks
from tests.rapid.speculation.fast.test_step_counts import KERNELS, Launches
from tests.rapid.tiny_models import lease_request, random_prompt, tiny_engine

FORWARD_S, DRAFT_S = 0.1, 0.03  # of a forward, and between a verdict and the next block
NUM_ROUNDS = 12
SPECULATION = SpeculationConfig()


def count(questions: list[Question]) -> int:
    """Return the operations and launches that answer some questions."""
    launches, kernels = Launches(), {name: getattr(row_kernels, name) for name in KERNELS}
    counted = {name: launches.counting(kernel) for name, kernel in kernels.items()}
    with patch.multiple(row_kernels, **counted), launches:
        answer_together(questions)
    return launches.count


def count_steps() -> list[list[object]]:
    """Count plain tokens and witnessed blocks, of one setting and of six, and with a filter."""
    row = 3 * torch.randn(2_000, generator=torch.Generator().manual_seed(0))
    rows: list[list[object]] = []
    for number, top_p in ((1, 1.0), (6, 1.0), (1, 0.9), (6, 0.9)):
        samplings = [SamplingConfig(temperature=0.5 + i / 10, top_p=top_p) for i in range(number)]
        draws = [Draw(sampling, SPECULATION, 0, i) for i, sampling in enumerate(samplings)]
        judged = blocks(np.random.default_rng(0), draws, 300, is_witnessed=True)
        plain = count([ToDecode(row, draw) for draw in draws])
        rows.append([number, top_p, plain, count([*judged])])
    return rows


async def verify_rounds(engine: Engine, index: int, *, is_witnessed: bool) -> list[float]:
    """Return the seconds of each verify call of one loop."""
    lease_ids = [f"{index}/target", f"{index}/witness"][: 1 + is_witnessed]
    speculation = SPECULATION if is_witnessed else SpeculationConfig(eta=0)
    for lease_id in lease_ids:
        settings = {"temperature": 1.0, "seed": index, "speculation": speculation}
        await engine.open(lease_request(lease_id, random_prompt(20), max_tokens=150, **settings))
        await engine.prefill(lease_id)
    ids, probs = np.array([5, 6, 7, 8], np.int32), np.array([0.4, 0.3, 0.2, 0.1], np.float32)
    seconds, position = [], 0
    for number in range(NUM_ROUNDS):
        await asyncio.sleep(DRAFT_S * (0.6 + 0.2 * ((index * 7 + number * 3) % 5)))
        block = DraftBlock("draft", 0, position, ids, np.tile(ids, (4, 1)), np.tile(probs, (4, 1)))
        began = time.perf_counter()
        witness = [(engine, lease_id) for lease_id in lease_ids[1:]]
        verdict = await engine.verify(lease_ids[0], 0, block, *witness)
        seconds.append(time.perf_counter() - began)
        position += len(verdict.token_ids)
    return seconds[1:]


def time_rounds(num_loops: int, *, is_witnessed: bool) -> float:
    """Return the median of verify calls, in forwards."""
    engine = tiny_engine(max_leases=64, kv_cache_tokens=64 * 256, draft_ahead=False)
    run = engine._compute.runner.run

    def run_slowly(feeds: Any) -> Any:
        if any(feed.num_wanted for feed in feeds):
            time.sleep(FORWARD_S)
        return run(feeds)

    engine._compute.runner.run = run_slowly  # type: ignore[method-assign]

    async def loops() -> list[list[float]]:
        each = [verify_rounds(engine, i, is_witnessed=is_witnessed) for i in range(num_loops)]
        return await asyncio.gather(*each)

    found = asyncio.run(loops())
    engine.close()
    return median(one for loop in found for one in loop) / FORWARD_S


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    header = ("settings", "top_p", "plain tokens, launches", "witnessed blocks, launches")
    print(table(header, count_steps()))
    rounds = [
        [loops, *(f"{time_rounds(loops, is_witnessed=each):.2f}" for each in (False, True))]
        for loops in (1, 6)
    ]
    print(table(("loops", "forwards of a verify call", "with a witness"), rounds))


if __name__ == "__main__":
    main()
