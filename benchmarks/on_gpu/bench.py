"""The state of a run of `gpu.py`: its plan, device and deadline, and the results so far."""

from __future__ import annotations

import gc
import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu.served import Served
from evaluation.circumstances import circumstances
from rapid.engines.attention.survey import KernelCandidate, device_ms
from rapid.engines.kv.cache import KVLayout

# Memory bandwidth in bytes per second and dense bfloat16 operations per second, from NVIDIA's
# datasheets.
DEVICES = {
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100": (3.35e12, 989e12),
    "A100-SXM4-40GB": (1.555e12, 312e12),
    "A100": (2.04e12, 312e12),
}

SHAPES = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
TINY = {
    "hidden_size": 128,  # heads of 32, so that weights of four bits can be packed
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Plan:
    """The shapes, sizes and repetitions to measure."""

    contexts: tuple[int, ...] = (131072, 32768, 8192)
    batches: tuple[int, ...] = (1, 2, 4, 6)
    rows: tuple[int, ...] = (1, 2, 4, 8, 12, 16)
    draft_context: int = 5120
    chunk: int = 2048
    slice_layers: tuple[int, int] = (4, 8)
    vocab_size: int = 128256
    repeats: int = 9
    shapes: dict[str, dict[str, Any]] = field(default_factory=lambda: SHAPES)


SMOKE = Plan(
    contexts=(512, 256),
    batches=(1, 2),
    rows=(1, 2, 8),
    draft_context=128,
    chunk=64,
    slice_layers=(1, 2),
    vocab_size=256,
    repeats=1,
    shapes={
        "8B": TINY | {"num_hidden_layers": 2},
        "1B": TINY | {"num_hidden_layers": 1},
        "70B": TINY | {"num_hidden_layers": 10},
    },
)


class OutOfTime(BaseException):
    """A part was given up. It is no `Exception`, so that no handler takes it for a failure."""


def told_of(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"failed ({type(error).__name__}: {first[:200]})"


@dataclass
class Bench:
    """The device, the deadline, and the results so far."""

    plan: Plan
    device: torch.device
    dtype: torch.dtype
    deadline: float
    candidates: list[KernelCandidate]
    out: Path
    report: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str, str, str]] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    models: dict[str, Served] = field(default_factory=dict)
    # Milliseconds of the target's steps by (context, batch, rows), and of a drafter's token by name
    # and batch.
    step_ms: dict[tuple[int, int, int], float] = field(default_factory=dict)
    draft_ms: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def peak(self) -> tuple[float, float]:
        """Return bandwidth and operations per second, from the datasheet or as measured."""
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else "cpu"
        for known, numbers in DEVICES.items():
            if known in name:
                return numbers
        return self.report["copy_bytes_per_s"], float("nan")

    def check_time(self, needed_s: float, what: str) -> None:
        left = self.deadline - time.monotonic()
        if left < needed_s:
            raise OutOfTime(f"{what}: needs about {needed_s:.0f} s, {left:.0f} s are left")

    def say(self, what: str, measured: str, asked: str = "", passed: bool | None = None) -> None:
        """Add a line to the last table and print it."""
        verdict = "" if passed is None else ("pass" if passed else "FAIL")
        self.lines.append((what, measured, asked, verdict))
        print(f"  {what}: {measured}", flush=True)

    def kernel_ms(self, run: Callable[[], object]) -> float:
        return device_ms(run) if self.is_cuda else self.wall_ms(run)

    def wall_ms(self, run: Callable[[], object], warm: int = 1) -> float:
        """Return a call's median milliseconds on the host, the device idle before and after."""
        for _ in range(warm):
            run()
        times = []
        for _ in range(self.plan.repeats):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            times.append((time.perf_counter() - start) * 1e3)
        median = statistics.median(times)
        self.spreads.append((max(times) - min(times)) / median)
        return median

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def lose(self, name: str, ms: float) -> None:
        """Note the time of one of `rapid.planning.plan.Losses` where it is measured first."""
        self.report.setdefault("losses", {}).setdefault(name, max(ms, 1e-3) / 1e3)

    def count_launches(self, run: Callable[[], object]) -> tuple[int, float]:
        """Return a call's launches (on a CPU operations) and the milliseconds that they take."""
        kind = torch.profiler.ProfilerActivity.CUDA if self.is_cuda else None
        kinds = [kind or torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds) as seen:
            run()
            self.wait()
        events = seen.events() or []
        if self.is_cuda:
            events = [one for one in events if one.device_type == torch.autograd.DeviceType.CUDA]
        return len(events), sum(one.time_range.elapsed_us() for one in events) / 1e3

    def driver_bytes(self) -> int:
        """Return the memory in use that is not torch's: the context, kernels, captured graphs."""
        if not self.is_cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def free_bytes(self) -> int:
        if not self.is_cuda:
            return 2**30
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def part(self, name: str, needed_s: float, run: Callable[[Bench], None]) -> None:
        """Run a part of the report, which may be skipped or fail without the others."""
        print(f"\n{name}", flush=True)
        start = time.monotonic()
        try:
            self.check_time(needed_s, name)
            run(self)
        except OutOfTime as skipped:
            self.say(name, f"skipped ({skipped})")
        except Exception as error:
            logging.exception("%s failed", name)
            self.say(name, told_of(error))
        print(f"  ({time.monotonic() - start:.0f} s)", flush=True)
        self.save()

    def save(self) -> None:
        """Save all results so far, so that a run that is cut off leaves its finished parts."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        report = circumstances() | self.report | {"table": self.lines}
        self.out.write_text(json.dumps(report, indent=1) + "\n")


def layout_of(bench: Bench, shape: str, num_layers: int | None = None) -> KVLayout:
    sizes = bench.plan.shapes[shape]
    return KVLayout(
        sizes["num_key_value_heads"],
        sizes["hidden_size"] // sizes["num_attention_heads"],
        bench.dtype,
        (bench.device,) * (num_layers or sizes["num_hidden_layers"]),
    )
