"""The share of an engine's steps that have a captured graph, counted without a GPU.

    python -m benchmarks.decoding.step_shapes [--answers 400]

A load is simulated (`simulated_rounds.py`): the real loop, controller and scheduler choose which
rows each step has, while the seconds of a step are those of Llama-3.1-8B as target and a 1B drafter
on an H200, by bytes and operations. Answers are `lossless` (the controller may rest), fused (it may
not) and plain; they arrive, end anywhere, and begin with prompts half of which are cached. Every
step is then looked up as `StepGraphs` does: it is replayed unless its bucket has not been captured
and tried yet, or 32 others have. Steps with a prefill chunk have no graph, as they are bound by
arithmetic, and are counted apart. Three ways to form buckets are compared: equal shapes without
padding, rectangles (each sequence padded to the longest), and those of
`rapid.engines.forward.buckets`. It takes about 10 seconds.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from benchmarks.decoding.simulated_rounds import Costs, Load, Run, Step
from benchmarks.reporting import keep, table
from rapid.engines.attention.segments import Segment
from rapid.engines.forward.buckets import bucket_of
from rapid.engines.forward.cuda_graphs import MAX_SHAPES, STEPS_BEFORE

# 16 and 2.5 GB of weights at 3.8 TB/s; 16 and 2.5 GFLOP a row at 600 TFLOP/s; 128 and 32 KiB a key.
TARGET = Costs(start_s=4.2e-3, row_s=27e-6, key_s=34e-9)
DRAFTER = Costs(start_s=1.0e-3, row_s=5e-6, key_s=9e-9)
LOADS = {
    "6 users": Load(6, TARGET, DRAFTER),
    "6 users, long documents": Load(6, TARGET, DRAFTER, document=(24000, 4000)),
    "16 users, short documents": Load(16, TARGET, DRAFTER, document=(3000, 1000)),
}
Lookup = Callable[[Sequence[int]], tuple[Hashable, int] | None]  # a bucket and its rows


def equal(lengths: Sequence[int]) -> tuple[Hashable, int] | None:
    shape = len(lengths), lengths[0]
    return (shape, sum(lengths)) if len(set(lengths)) == 1 else None


def rectangle(lengths: Sequence[int]) -> tuple[Hashable, int] | None:
    bucket = bucket_of(_segments(lengths))
    assert bucket is not None
    shape = bucket.sequences, bucket.most_rows
    return shape, shape[0] * shape[1]


def ours(lengths: Sequence[int]) -> tuple[Hashable, int] | None:
    bucket = bucket_of(_segments(lengths))
    assert bucket is not None
    return bucket, bucket.rows


WAYS: dict[str, Lookup] = {"equal shapes": equal, "rectangles": rectangle, "buckets": ours}


def _segments(lengths: Sequence[int]) -> list[Segment]:
    return [Segment(0, length, [], []) for length in lengths]


def counted(steps: list[Step], lookup: Lookup) -> dict[str, float]:
    """Return the share of steps that are replayed, and the rows that padding adds to them."""
    seen: Counter[Hashable] = Counter()
    num_replayed = num_rows = num_padded = 0
    for step in steps:
        found = lookup([rows for rows, _ in step])
        if found is None or (found[0] not in seen and len(seen) == MAX_SHAPES):
            continue
        seen[found[0]] += 1
        if seen[found[0]] > STEPS_BEFORE + 2:  # after the step of the capture and that of the trial
            num_replayed += 1
            num_rows += sum(rows for rows, _ in step)
            num_padded += found[1]
    return {
        "replayed": num_replayed / len(steps),
        "graphs": len(seen),
        "rows_a_step": num_rows / num_replayed,
        "padded_rows_a_step": num_padded / num_replayed,
    }


def without_chunks(steps: list[Step]) -> list[Step]:
    """Return the steps in which no sequence has the rows of a prefill chunk."""
    return [
        step
        for step in steps
        if bucket_of(_segments([rows for rows, _ in step])) and any(wants for _, wants in step)
    ]


def measure(load: Load, num_answers: int) -> dict[str, Any]:
    run = Run(load).until(num_answers)
    report: dict[str, Any] = {}
    for role, engine in (("target", run.target), ("drafter", run.drafter)):
        steps = without_chunks(engine.steps)
        report[role] = {
            "steps": len(engine.steps),
            "steps_without_chunk": len(steps),
            "sequences": dict(sorted(Counter(len(step) for step in steps).items())),
            **{way: counted(steps, lookup) for way, lookup in WAYS.items()},
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=400)
    arguments = parser.parse_args()
    report = {name: measure(load, arguments.answers) for name, load in LOADS.items()}
    rows = []
    for name, found in report.items():
        for role, engine in found.items():
            shares = [f"{engine[way]['replayed']:.1%}" for way in WAYS]
            padding = [
                f"{engine[way]['rows_a_step']:.1f} to {engine[way]['padded_rows_a_step']:.1f}"
                for way in ("rectangles", "buckets")
            ]
            steps = f"{engine['steps_without_chunk']:,} of {engine['steps']:,}"
            rows.append([name, role, steps, *shares, *padding, engine["buckets"]["graphs"]])
    header = ["load", "engine", "steps without chunk", *(f"replayed, {way}" for way in WAYS)]
    header += ["rows a step, rectangles", "rows a step, buckets", "graphs"]
    title = "Steps of a simulated mixed load that a captured graph replays"
    keep("step_shapes", title, table(header, rows), {"answers": arguments.answers, **report})


if __name__ == "__main__":
    main()
