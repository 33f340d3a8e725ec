"""What a plan counts beside bytes: small operations of a layer, Ray's calls, sums over GPUs."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.on_gpu.bench import Bench, layout_of
from benchmarks.on_gpu.served import PAGE
from rapid.engines.attention.survey import device_ms
from rapid.engines.forward.graphs.cuda_graphs import GraphCapture
from rapid.engines.forward.layers.decoder import layer_kernels_of
from rapid.engines.forward.layers.layer_operations import LayerOperations
from rapid.engines.forward.linear import products
from rapid.engines.forward.sharding.group import Group
from rapid.engines.forward.sharding.meeting import InFile
from rapid.engines.kv.cache import KVCache

CALLS = 32  # in one graph: each takes a few microseconds
SUMMED = 8192  # numbers of a 70B's row, in bfloat16
ROUNDS = 200
DRAFTED, CANDIDATES = 10, 64


def small_operations(bench: Bench) -> None:
    """Time the operations of an 8B's layer beside products and attention, also for fp8 weights."""
    sizes, device = bench.plan.shapes["8B"], bench.device
    width, heads, kv_heads = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = width // heads
    operations = LayerOperations(heads, kv_heads, head_dim, 1e-5)
    if bench.is_cuda:
        found = layer_kernels_of(operations, device, bench.dtype, bench.dtype, width, head_dim)
        operations = found or operations

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(bench.dtype)

    hidden, weight, attended = draw(1, width), draw(width), draw(1, heads * head_dim)
    mixed = draw(1, (heads + 2 * kv_heads) * head_dim)
    both = draw(1, 2 * sizes["intermediate_size"])
    angles, activation = (draw(1, 1, head_dim), draw(1, 1, head_dim)), torch.nn.SiLU()
    cache, slots = KVCache(layout_of(bench, "8B", 1), 1, PAGE), torch.zeros(1, device=device).long()

    def layer_ms(into: products.AnyProduct) -> float:
        def layers() -> torch.Tensor:
            for _ in range(CALLS):
                operations.add_norm(hidden, hidden, None, weight, into)
                operations.store_heads(mixed, angles, None, cache, 0, slots)
                operations.prepare(attended, into)
                total, _ = operations.add_norm(hidden, hidden, None, weight, into)
                operations.gate(both, activation, into)
            return total

        return bench.kernel_ms(GraphCapture()(layers) if bench.is_cuda else layers) / CALLS

    matrix = draw(16, width)
    ms = layer_ms(products.Product(matrix))
    bench.lose("layer_s", ms)  # without the merge of attention's parts, which `kv_share` has
    told = f"{1e3 * ms:.1f} us"
    if not bench.is_cuda or torch.cuda.get_device_capability() >= products.FP8_CAPABILITY:
        more = layer_ms(products.Product(*products.quantize_weight(matrix, "fp8"))) - ms
        bench.lose("fp8_layer_s", more)
        told += f"; {1e3 * more:.1f} us more into fp8 weights"
    bench.say("a layer's operations beside products and attention", told)


def calls_of_a_round(bench: Bench) -> None:
    """Time a block's way from one actor of Ray to another, and the verdict's to a third."""
    try:
        import ray
    except ImportError:
        bench.say("Ray's calls of a round", "not measured: Ray is not installed")
        return

    class Side:  # in here, so that its processes import nothing of this benchmark
        async def draft(self, verdict: Any) -> Any:
            shape = DRAFTED, CANDIDATES
            return np.zeros(shape, np.int32), np.zeros(shape, np.float32), verdict

        async def verify(self, block: Any) -> Any:
            return tuple(range(len(block[0])))

        async def take_turns(self, target: Any, drafter: Any, number: int) -> float:
            began, verdict = time.perf_counter(), None
            for _ in range(number):
                verdict = await target.verify.remote(drafter.draft.remote(verdict))
            return (time.perf_counter() - began) * 1e3 / number

    handler = signal.getsignal(signal.SIGTERM)  # Ray sets its own
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray listens on loopback only
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )
    try:
        target, drafter, loop = (ray.remote(num_cpus=0)(Side).remote() for _ in range(3))
        ray.get(loop.take_turns.remote(target, drafter, ROUNDS // 10))
        ms = ray.get(loop.take_turns.remote(target, drafter, ROUNDS))
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)
    bench.lose("round_s", ms)
    bench.say("Ray's calls of a round", f"{ms:.2f} ms, with a block of {DRAFTED}")


def sums(bench: Bench) -> None:
    """Time small sums over the GPUs of this machine, one process each."""
    size = torch.cuda.device_count()
    bench.say("sums over machines", "not measured: needs several")
    if size < 2:
        bench.say("sums over GPUs", "not measured: needs several")
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(time_sums, (size, folder, "cuda"), nprocs=size)
        ms = float((Path(folder) / "ms").read_text())
    bench.lose("reduce_s", ms)
    bench.say(f"a sum of {SUMMED} numbers over {size} GPUs", f"{1e3 * ms:.1f} us")


def time_sums(rank: int, size: int, folder: str, kind: str) -> None:
    """Sum with the other ranks, as captured steps do; the first writes the milliseconds of one."""
    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    group = Group(InFile(f"{folder}/meeting"), rank, size, device)
    row = torch.zeros(SUMMED, dtype=torch.bfloat16, device=device)

    def run() -> torch.Tensor:
        for _ in range(CALLS):
            group.sum(row)
        return row

    timed: Callable[[], object] = GraphCapture()(run) if kind == "cuda" else run
    ms = device_ms(timed) if kind == "cuda" else wall_ms(timed)
    if not rank:
        (Path(folder) / "ms").write_text(str(ms / CALLS))


def wall_ms(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3
