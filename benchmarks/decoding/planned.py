"""What `rapid plan` predicts of a step, against what a step takes, on a CPU.

    python -m benchmarks.decoding.planned [--quick]

This machine is measured apart from any model: how fast matrices are read that multiply as many
rows, how fast keys and values are read, and what a step takes beside both (of models so small that
nothing else counts). `Replica.step_s`, the formula of `rapid plan`, then predicts the steps of
`decode.py`'s plain shapes.

All of it is on one thread and in processor time, and reading is measured right before and after
each answer: an error is the median of what its repetitions give. So what else the machine does
changes it little. It takes about 2 minutes, with `--quick` one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.decoding.decode import (
    FULL_PLAIN,
    ONE_DOCUMENT,
    QUESTION,
    QUICK_PLAIN,
    ROOM,
    TARGET,
    Case,
    plain,
)
from benchmarks.engine.filled import FilledEngine, Model, embedded_target, random_model
from benchmarks.reporting import keep, table
from rapid.engines.attention.cpu import partial
from rapid.engines.attention.shared_prefixes import MIN_SHARED_KEYS
from rapid.planning.gpus import GPU
from rapid.planning.plan import IDEAL, Losses, Replica
from rapid.planning.shapes import ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
MAX_TABLE_BYTES = 2**29  # of the matrices, and of the keys and values, that are read in turn
TINY = 64  # rows and columns of a matrix that takes no time to read
NUM_WORDS = 1024  # of a model that holds nothing: as many as the embedded ones have
NUM_TOKENS = 9  # of an answer: few, so that some answers are not disturbed
UNBOUNDED = 1e18  # operations per second: what limits here is reading
Hosts = dict[tuple[str, bool], Losses]  # by dtype, and whether sequences share a prefix
Head = tuple[int, int, int]  # KV heads, queries for each, width


async def step_s(filled: FilledEngine, repeats: int) -> float:
    """Return the processor seconds of a plain step, at its best."""
    try:
        await filled.open()
        run = plain(filled, NUM_TOKENS)
        return min([(await run()).cpu_ms for _ in range(repeats)]) / 1e3
    finally:
        filled.close()


async def host_time(dtype: str, *, is_shared: bool, repeats: int) -> Losses:
    """Measure what steps take beside reading, with models of 1 and 9 layers that hold nothing.

    Sequences that share a prefix are attended to in another way, and only if it is long.
    """
    seconds = {}
    for layers in (1, 9):
        model = random_model(
            dtype,
            hidden_size=TINY,
            num_layers=layers,
            num_heads=2,
            num_kv_heads=1,
            vocab_size=NUM_WORDS,
        )
        for batch in (1, 8):
            shared = MIN_SHARED_KEYS if is_shared else 0
            filled = FilledEngine(model.ours, shared + 16, batch=batch, room=ROOM, shared=shared)
            seconds[layers, batch] = await step_s(filled, repeats)
    alone, crowd = ((seconds[9, batch] - seconds[1, batch]) / 8 for batch in (1, 8))
    layer_sequence_s = (crowd - alone) / 7
    sequence_s = (seconds[1, 8] - seconds[1, 1]) / 7 - layer_sequence_s
    step = seconds[1, 1] - alone - sequence_s
    return replace(
        IDEAL,
        step_s=step,
        sequence_s=sequence_s,
        layer_s=alone - layer_sequence_s,
        layer_sequence_s=layer_sequence_s,
    )


class Reading:
    """Reads weights and keys and values as a step of a model does, without the model.

    It reads as many bytes as the step does, up to a limit, because what fits a cache is read
    faster. What a call takes that reads almost nothing is left out: the host's time has it already.
    """

    def __init__(self, model: Model, case: Case, *, is_shared: bool) -> None:
        """Make matrices, and the keys and values of some layers."""
        _, _, length, batch = case
        kv_heads, group, width = head_of(model)
        hidden, dtype = model.ours.model.config.hidden_size, model.ours.dtype
        one = torch.randn(4 * hidden, hidden, dtype=dtype)
        self._tables = copies(one, sum(each.nbytes for each in model.ours.model.parameters()))
        self._tiny_tables = [torch.randn(TINY, TINY, dtype=dtype)] * len(self._tables)
        self._inputs = torch.randn(batch, hidden, dtype=dtype)
        rows = group * batch if is_shared else group
        self._query = torch.randn(1, kv_heads, rows, width, dtype=dtype)
        layer = torch.randn(2, 1, kv_heads, length, width, dtype=dtype)
        num_layers = model.ours.model.config.num_hidden_layers
        self._layers = copies(layer, layer.nbytes * num_layers * (1 if is_shared else batch))
        tiny_layer = torch.randn(2, 1, kv_heads, ROOM, width, dtype=dtype)
        self._tiny_layers = [tiny_layer] * len(self._layers)

    @torch.inference_mode()
    def per_s(self) -> tuple[float, float]:
        """Return the bytes of weights, and of keys and values, read per second of processor.

        All is read once before, as a step finds what the step before it read.
        """
        self._multiplied_s(self._tables), self._attended_s(self._layers)
        weights_s = self._multiplied_s(self._tables) - self._multiplied_s(self._tiny_tables)
        kv_s = self._attended_s(self._layers) - self._attended_s(self._tiny_layers)
        weights = sum(weight.nbytes for weight in self._tables)
        return weights / weights_s, sum(kv.nbytes for kv in self._layers) / kv_s

    def _multiplied_s(self, tables: list[torch.Tensor]) -> float:
        began = time.thread_time()
        for weight in tables:
            torch.nn.functional.linear(self._inputs[:, : weight.shape[1]], weight)
        return time.thread_time() - began

    def _attended_s(self, layers: list[torch.Tensor]) -> float:
        began = time.thread_time()
        for keys, values in layers:
            partial(self._query, keys, values, 0.1, is_causal=False)
        return time.thread_time() - began


def copies(one: torch.Tensor, num_bytes: int) -> list[torch.Tensor]:
    """Return copies that together have this many bytes, as far as the limit allows."""
    return [one.clone() for _ in range(max(1, min(num_bytes, MAX_TABLE_BYTES) // one.nbytes))]


def head_of(model: Model) -> Head:
    """Return the KV heads of a model, the queries of each, and their width."""
    settings = model.ours.model.config
    kv_heads = settings.num_key_value_heads
    return kv_heads, settings.num_attention_heads // kv_heads, model.ours.kv_layout.head_dim


async def measured_case(case: Case, hosts: Hosts, repeats: int) -> dict[str, Any]:
    """Measure one shape, and predict every repetition by what was read around it."""
    name, dtype, length, batch = case
    length -= ROOM if name != "random" else 0
    model = random_model(dtype, **TARGET) if name == "random" else embedded_target(dtype)
    shared = length - QUESTION if name == ONE_DOCUMENT and batch > 1 else 0
    kind = dtype, shared > 0
    if kind not in hosts:
        hosts[kind] = await host_time(dtype, is_shared=shared > 0, repeats=repeats)
    reading = Reading(model, (name, dtype, length, batch), is_shared=shared > 0)
    filled = FilledEngine(model.ours, length, batch=batch, room=ROOM, shared=shared)
    measured, planned, rates = [], [], []
    try:
        await filled.open()
        run = plain(filled, NUM_TOKENS)
        for repeat in range(repeats + 1):
            before = await filled.on_its_thread(reading.per_s)
            seconds = (await run()).cpu_ms / 1e3
            after = await filled.on_its_thread(reading.per_s)
            if repeat:
                # The mean of both times, so the harmonic mean of their rates.
                rates.append([2 / (1 / a + 1 / b) for a, b in zip(before, after, strict=True)])
                replica = replica_of(model, case[1], length, shared, rates[-1], hosts[kind])
                planned.append(replica.step_s(batch))
                measured.append(seconds)
    finally:
        filled.close()
    weights, kv = (statistics.median(each) for each in zip(*rates, strict=True))
    num_layers = model.ours.model.config.num_hidden_layers
    return {
        "model": name, "dtype": dtype, "length": length, "batch": batch,
        "measured_ms": round(1e3 * statistics.median(measured), 3),
        "planned_ms": round(1e3 * statistics.median(planned), 3),
        "error": round(statistics.median(ratio(planned, measured)) - 1, 3),
        "host_ms": round(1e3 * hosts[kind].host_s(batch, num_layers), 3),
        "weights_gb_per_s": round(weights / 1e9, 1),
        "kv_gb_per_s": round(kv / 1e9, 1),
    }  # fmt: skip


def ratio(some: list[float], others: list[float]) -> list[float]:
    """Return the ratios of neighbours in time."""
    return [a / b for a, b in zip(some, others, strict=True)]


def replica_of(
    model: Model, dtype: str, length: int, shared: int, rates: list[float], host: Losses
) -> Replica:
    """Return the replica that `rapid plan` would make of this model on this machine."""
    weights, kv = rates
    return Replica(
        ModelShape.of(model.ours.model.config.to_dict()),
        GPU("this CPU", 0, weights, UNBOUNDED, "measured"),
        length + NUM_TOKENS // 2,
        shared,
        layer_bits=8 * BYTES[dtype],
        other_bits=8 * BYTES[dtype],
        kv_bytes=BYTES[dtype],
        losses=replace(host, kv_share=kv / weights),
    )


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
              "planned", "error", "of it the host's", "weights, GB/s", "KV, GB/s"]  # fmt: skip
    rows = [
        [f"{value:+.0%}" if name == "error" else value for name, value in case.items()]
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
    parser.add_argument("--cases", type=int, help="the first so many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = (QUICK_PLAIN if arguments.quick else FULL_PLAIN)[: arguments.cases]
    measured = asyncio.run(measure(cases, 8 if arguments.quick else 16))
    keep(
        None if arguments.quick else "planned",
        "A step as planned and as measured",
        f"torch {torch.__version__}, one thread, processor time.\n\n{shown(measured)}",
        {"cases": measured, "torch": torch.__version__},
    )


if __name__ == "__main__":
    main()
