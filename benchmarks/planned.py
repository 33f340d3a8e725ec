"""What `rapid plan` predicts of a step, against what a step takes, on a CPU.

    python benchmarks/planned.py [--quick]

This machine is measured first, apart from any model: how fast matrices are read that multiply as
many rows, how fast keys and values are read, and what a step takes beside both (of models so small
that nothing else counts). `Replica.step_s`, the formula of `rapid plan`, then predicts the steps of
`decode.py`'s plain shapes, which are measured between two measurements of the machine.

All of it is on one thread and in processor time, of which every number is the least of its
repetitions: so what else the machine does changes it little. It takes about 5 minutes, with
`--quick` one.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from decode import FULL_PLAIN, ONE_DOCUMENT, QUESTION, QUICK_PLAIN, ROOM, TARGET, Case, plain
from filled import FilledEngine, Model, embedded_target, random_model
from reporting import keep, table

from rapid.engines.attention.cpu import partial
from rapid.engines.attention.shared_prefixes import MIN_SHARED_KEYS
from rapid.planning.plan import GPU, HostTime, Replica
from rapid.planning.shapes import ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
TABLE_BYTES = 2**25  # of the matrices, and of the keys and values, that are read in turn
NUM_TOKENS = 9  # of an answer: few, so that some answers are not disturbed
UNBOUNDED = 1e18  # operations per second: what limits here is reading
Hosts = dict[tuple[str, bool], HostTime]  # by dtype, and whether sequences share a prefix
Head = tuple[int, int, int]  # KV heads, queries for each, width


async def step_s(filled: FilledEngine, repeats: int) -> float:
    """Return the processor seconds of a plain step, at its best."""
    try:
        await filled.open()
        run = plain(filled, NUM_TOKENS)
        return min([(await run()).cpu_ms for _ in range(repeats)]) / 1e3
    finally:
        filled.close()


async def host_time(dtype: str, *, is_shared: bool, repeats: int) -> HostTime:
    """Measure what steps take beside reading, with models of 1 and 9 layers that hold nothing.

    Sequences that share a prefix are attended to in another way, and only if it is long.
    """
    seconds = {}
    for layers in (1, 9):
        model = random_model(
            dtype, hidden_size=64, num_layers=layers, num_heads=2, num_kv_heads=1, vocab_size=64
        )
        for batch in (1, 8):
            shared = MIN_SHARED_KEYS if is_shared else 0
            filled = FilledEngine(model.ours, shared + 16, batch=batch, room=ROOM, shared=shared)
            seconds[layers, batch] = await step_s(filled, repeats)
    alone, crowd = ((seconds[9, batch] - seconds[1, batch]) / 8 for batch in (1, 8))
    layer_sequence_s = (crowd - alone) / 7
    sequence_s = (seconds[1, 8] - seconds[1, 1]) / 7 - layer_sequence_s
    step = seconds[1, 1] - alone - sequence_s
    return HostTime(step, sequence_s, alone - layer_sequence_s, layer_sequence_s)


def best_s(function: Callable[[], object], repeats: int) -> float:
    """Return the processor seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        function()
        times.append(time.thread_time() - began)
    return min(times)


@torch.inference_mode()
def weights_per_s(dtype: str, hidden: int, rows: int, repeats: int) -> float:
    """Return the bytes of weights per second that products with that many rows read."""
    one = torch.randn(4 * hidden, hidden, dtype=getattr(torch, dtype))
    tables = [one.clone() for _ in range(max(1, TABLE_BYTES // one.nbytes))]
    inputs = torch.randn(rows, hidden, dtype=one.dtype)

    def read() -> None:
        for weight in tables:
            torch.nn.functional.linear(inputs, weight)

    read()
    return sum(weight.nbytes for weight in tables) / best_s(read, repeats)


@torch.inference_mode()
def kv_per_s(dtype: str, head: Head, length: int, repeats: int) -> float:
    """Return the bytes of keys and values per second that a decoding row's attention reads."""
    kv_heads, group, width = head
    query = torch.randn(1, kv_heads, group, width, dtype=getattr(torch, dtype))
    shape = (1, kv_heads, length, width)
    num_layers = max(1, TABLE_BYTES // (2 * query.element_size() * kv_heads * length * width))
    layers = [torch.randn(2, *shape, dtype=query.dtype) for _ in range(num_layers)]

    def read() -> None:
        for keys, values in layers:
            partial(query, keys, values, 0.1, is_causal=False)

    read()
    return sum(layer.nbytes for layer in layers) / best_s(read, repeats)


async def predicted(model: Model, case: Case, shared: int, host: HostTime, repeats: int) -> Replica:
    """Measure the machine, and return a replica with what was measured, which predicts steps."""
    _, dtype, length, batch = case
    settings = model.ours.model.config
    kv_heads, group, width = head_of(model)
    rows = group * batch if shared else group
    filled = FilledEngine(model.ours, 16, room=ROOM)
    try:
        await filled.open()
        weights, kv = [
            await filled.on_its_thread(function)
            for function in (
                functools.partial(weights_per_s, dtype, settings.hidden_size, batch, repeats),
                functools.partial(kv_per_s, dtype, (kv_heads, rows, width), length, repeats),
            )
        ]
    finally:
        filled.close()
    return Replica(
        ModelShape.of(settings.to_dict()),
        GPU("this CPU", 0, weights, UNBOUNDED, "measured"),
        length + NUM_TOKENS // 2,
        shared,
        layer_bits=8 * BYTES[dtype],
        other_bits=8 * BYTES[dtype],
        kv_bytes=BYTES[dtype],
        kv_share=kv / weights,
        host=host,
    )


def head_of(model: Model) -> Head:
    """Return the KV heads of a model, the queries of each, and their width."""
    settings = model.ours.model.config
    kv_heads = settings.num_key_value_heads
    return kv_heads, settings.num_attention_heads // kv_heads, model.ours.kv_layout.head_dim


async def measured_case(case: Case, hosts: Hosts, repeats: int) -> dict[str, Any]:
    """Measure one shape between two measurements of the machine, and predict it."""
    name, dtype, length, batch = case
    length -= ROOM if name != "random" else 0
    model = random_model(dtype, **TARGET) if name == "random" else embedded_target(dtype)
    shared = length - QUESTION if name == ONE_DOCUMENT and batch > 1 else 0
    kind = dtype, shared > 0
    if kind not in hosts:
        hosts[kind] = await host_time(dtype, is_shared=shared > 0, repeats=repeats)
    asked = model, (name, dtype, length, batch), shared, hosts[kind], repeats
    before = await predicted(*asked)
    filled = FilledEngine(model.ours, length, batch=batch, room=ROOM, shared=shared)
    seconds = await step_s(filled, repeats)
    after = await predicted(*asked)
    replica = min(before, after, key=lambda each: each.step_s(batch))
    bandwidth = replica.gpu.bandwidth
    return {
        "model": name, "dtype": dtype, "length": length, "batch": batch,
        "measured_ms": round(1e3 * seconds, 3),
        "predicted_ms": round(1e3 * replica.step_s(batch), 3),
        "error": round(replica.step_s(batch) / seconds - 1, 3),
        "host_ms": round(1e3 * replica.host.of(batch, replica.shape.layers), 3),
        "weights_gb_per_s": round(bandwidth / 1e9, 1),
        "kv_gb_per_s": round((replica.kv_share or 1) * bandwidth / 1e9, 1),
        "host": dataclasses.asdict(replica.host),
    }  # fmt: skip


async def measure(cases: list[Case], repeats: int) -> list[dict[str, Any]]:
    """Measure and predict all cases, one after the other."""
    measured: list[dict[str, Any]] = []
    hosts: Hosts = {}
    for case in cases:
        measured.append(await measured_case(case, hosts, repeats))
        print(*measured[-1].values(), flush=True)
    return measured


def shown(cases: list[dict[str, Any]]) -> str:
    """Return the table, and how far the predictions are off."""
    header = ["model", "dtype", "tokens of context", "sequences", "measured, ms a step",
              "predicted", "error", "of it the host's", "weights, GB/s", "KV, GB/s"]  # fmt: skip
    rows = [
        [
            f"{value:+.0%}" if name == "error" else value
            for name, value in case.items()
            if name != "host"
        ]
        for case in cases
    ]
    errors = sorted(abs(case["error"]) for case in cases)
    within = sum(error <= 0.15 for error in errors)
    return table(header, rows) + (
        f"\nErrors: median {statistics.median(errors):.0%}, worst {errors[-1]:.0%}; "
        f"{within} of {len(errors)} shapes within 15 %.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes, nothing kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = QUICK_PLAIN if arguments.quick else FULL_PLAIN
    measured = asyncio.run(measure(cases, 8 if arguments.quick else 16))
    keep(
        None if arguments.quick else "planned",
        "A step as planned and as measured",
        f"torch {torch.__version__}, one thread, processor time.\n\n{shown(measured)}",
        {"cases": measured, "torch": torch.__version__},
    )


if __name__ == "__main__":
    main()
