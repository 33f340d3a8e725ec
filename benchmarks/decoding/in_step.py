"""Tokens when a target's steps wait for blocks that are due, against steps that never wait.

    python -m benchmarks.decoding.in_step [--seeds 4] [--answers 120]

Loops over short documents are simulated (`simulated_rounds.py`): the real loop, controller and
scheduler, with the seconds of a step that the bytes and operations of two pairs of models take on
H200s. For each seed the same load runs with and without waiting; the ratios are of the milliseconds
per token of an answer, and of the tokens per second of all, with the standard error over seeds.
`fused` loops always draft 10 tokens; in `mixed` ones a controller chooses, or there is no drafter.
It takes about three minutes.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.decoding.simulated_rounds import Costs, Load, Mode, Run
from benchmarks.decoding.step_shapes import DRAFTER, TARGET
from benchmarks.reporting import keep, table

# A quarter of a 70B: 35 GB of weights at 3.8 TB/s, 160 all-reduces of 9 us, 35 GFLOP a
# row, 80 KiB a key.
LARGE = Costs(start_s=11e-3, row_s=60e-6, key_s=22e-9)
PAIRS = {"8B, drafter 1B": (TARGET, DRAFTER), "70B on four, drafter 8B": (LARGE, TARGET)}
MODES: dict[str, tuple[Mode, ...]] = {"fused": ("fused",), "mixed": ("lossless", "fused", "plain")}
LOOPS = (1, 2, 4, 16)


def run(load: Load, seed: int, num_answers: int, *, joins: bool) -> tuple[float, float, float]:
    """Return milliseconds per token of an answer, tokens per second, and sequences of a step."""
    done = Run(load, seed, joins=joins).until(num_answers)
    num_tokens = sum(tokens for _, tokens in done.decoding_s)
    sizes = [len(step) for step in done.target.steps if any(wants for _, wants in step)]
    ms = 1e3 * sum(seconds for seconds, _ in done.decoding_s) / num_tokens
    return ms, num_tokens / done.world.now, statistics.fmean(sizes)


def measure(load: Load, num_seeds: int, num_answers: int) -> dict[str, Any]:
    never, joined = (
        [run(load, seed, num_answers, joins=joins) for seed in range(num_seeds)]
        for joins in (False, True)
    )
    pairs = list(zip(never, joined, strict=True))
    per_token = [after[0] / before[0] for before, after in pairs]
    return {
        "ms_per_token": round(statistics.fmean(ms for ms, _, _ in never), 2),
        "sequences": [round(statistics.fmean(x[2] for x in each), 2) for each in (never, joined)],
        "per_token": round(statistics.fmean(per_token), 3),
        "error": round(statistics.stdev(per_token) / num_seeds**0.5, 3),
        "tokens_per_s": round(statistics.fmean(after[1] / before[1] for before, after in pairs), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--answers", type=int, default=120)
    arguments = parser.parse_args()
    rows, report = [], {}
    for pair, (target, drafter) in PAIRS.items():
        for loops in LOOPS:
            for name, modes in MODES.items():
                load = Load(
                    loops, target, drafter, think_s=0.05, document=(2000, 500), known=1.0,
                    modes=modes,
                )  # fmt: skip
                found = measure(load, arguments.seeds, arguments.answers)
                report[f"{pair}, {loops} loops, {name}"] = found
                rows.append(
                    [
                        pair,
                        loops,
                        name,
                        found["ms_per_token"],
                        f"{found['per_token']:.3f} ± {found['error']:.3f}",
                        f"{found['tokens_per_s']:.3f}",
                        "{} to {}".format(*found["sequences"]),
                    ]
                )
                print(*rows[-1], flush=True)
    header = ["models", "loops", "answers", "ms a token", "with waiting, ratio", "tokens/s, ratio"]
    header.append("sequences a step")
    settings = {"seeds": arguments.seeds, "answers": arguments.answers}
    keep("in_step", "A target that waits for blocks that are due", table(header, rows), {
        "settings": settings, "cases": report,
    })  # fmt: skip


if __name__ == "__main__":
    main()
