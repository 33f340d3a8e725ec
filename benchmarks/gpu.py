"""Attention, steps and speedups on one CUDA device, against its memory bandwidth.

The benchmark needs torch and transformers beside this repository. Weights are random at real
shapes, so texts mean nothing and acceptance is synthetic, which every such number says. The parts
run in the order below. A part is skipped with a line when its time or memory is missing, and given
up when it fails. The table of all results comes last, also when time runs out.

1. every attention candidate against float32; wrong ones are refused before anything is timed;
2. kernel time of the others against the bytes they must read (8K keys stay in the device's cache),
   also for a long sequence among short ones and for six questions on one document;
3. steps of Llama-3.1-8B and of drafters (itself, and the 1B), ordinary and as captured graphs;
4. the speedup over our own plain path: modelled from these steps, measured in rounds with all that
   engines do beside forwards, and modelled with the drafter on a device of its own;
5. prefill, whole and its attention alone;
6. Llama-3.1-70B from a slice of its layers, extrapolated, in bfloat16 and in four bits;
7. products of a 70B's layer with quantized weights, those of four bits against their numbers;
8. steps of the 8B with keys and values in fp8.

    python benchmarks/gpu.py [--minutes 9] [--out benchmarks/results/gpu.json] [--without NAME]
    python benchmarks/gpu.py --smoke      # tiny shapes on any machine, to check that it runs
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STARTED = time.monotonic()


def installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


sys.path.insert(0, str(Path(__file__).parents[1]))  # for a machine without an install
try:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from evaluation.circumstances import circumstances
    from rapid.engines.attention import ragged as attention
    from rapid.engines.attention.batch import Feed
    from rapid.engines.attention.cases import (
        Rows,
        chunk_checks,
        make_case,
        randomise,
        step_checks,
        tile_timings,
    )
    from rapid.engines.attention.cuda import all_candidates, choose_kernels
    from rapid.engines.attention.rows import Attend, Kernels
    from rapid.engines.attention.survey import (
        TOLERANCES,
        Candidate,
        Finding,
        Tunable,
        device_ms,
        survey,
    )
    from rapid.engines.forward import four_bits
    from rapid.engines.forward.buckets import padding_pages
    from rapid.engines.forward.cuda_graphs import GraphCapture
    from rapid.engines.forward.decoder import decoder_of
    from rapid.engines.forward.products import FP8_CAPABILITY, Method, Product, quantize, quantized
    from rapid.engines.forward.runner import Runner
    from rapid.engines.kv.cache import KVCache, KVLayout, PageTable, Run
    from rapid.messages import DraftBlock
    from rapid.planning.plan import draft_ahead_speedup, expected_tokens, sequential_speedup
    from rapid.speculation.draw import Draw
    from rapid.speculation.questions import ToDecode, ToJudge, ToPropose
    from rapid.speculation.sampling import proposal
    from rapid.speculation.step import answered
except ImportError as missing:
    has = ", ".join(map(installed, ("torch", "transformers", "numpy", "triton")))
    raise SystemExit(
        f"{missing}: this benchmark runs from a checkout of its repository and needs Python 3.11, "
        f"torch 2.7 and transformers 4.56 or newer; here is Python {platform.python_version()}, "
        f"{has}"
    ) from None

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
ACCEPTANCE = 0.77
MARK = f"synthetic acceptance {ACCEPTANCE}"
# These stand for `SamplingConfig()` and `SpeculationConfig(eta=0)` of rapid.config, which needs
# pydantic, with the property that judging reads.
SAMPLING: Any = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=None, seed=0)
LOSSLESS: Any = SimpleNamespace(
    rule="exact",
    transfer="adaptive",
    eta=0.0,
    max_draft=10,
    coupling="maximal",
    plausibility=0.1,
    draft_top_k=64,
    transfer_temperature=1.0,
    is_witnessed=False,
)

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
PAGE = 16


class OutOfTime(BaseException):
    """A part was given up. It is no `Exception`, so that no handler takes it for a failure."""


def out_of_time(*_: object) -> None:
    raise OutOfTime("time is up")


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
    candidates: list[Candidate]
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


# --- attention ------------------------------------------------------------------------------------


def layout_of(bench: Bench, shape: str, num_layers: int | None = None) -> KVLayout:
    sizes = bench.plan.shapes[shape]
    return KVLayout(
        sizes["num_key_value_heads"],
        sizes["hidden_size"] // sizes["num_attention_heads"],
        bench.dtype,
        (bench.device,) * (num_layers or sizes["num_hidden_layers"]),
    )


def correctness(bench: Bench) -> None:
    """Check every candidate; those that are wrong or missing leave `bench.candidates`."""
    candidates, bench.candidates = bench.candidates, []  # empty until each is found right
    layout = layout_of(bench, "8B", 1)
    heads = bench.plan.shapes["8B"]["num_attention_heads"]
    tolerance = TOLERANCES[bench.dtype]
    found = survey(candidates, step_checks(layout, heads, PAGE), [], tolerance, device_ms)
    able = [one for one in candidates if one.is_for_chunks]
    chunks = survey(able, chunk_checks(layout, heads, PAGE), [], tolerance, device_ms)
    large = [one for one in all_candidates(256) if one.name == "pages, flash-attn 2"]
    paged = survey(large, step_checks(layout, heads, 256), [], tolerance, device_ms)
    for kind, findings in (("steps", found), ("prefill", chunks), ("pages of 256", paged)):
        for finding in findings:
            bench.say(f"{kind}: {finding.candidate.name}", verdict_of(finding, tolerance))
        bench.report[f"correctness, {kind}"] = {
            one.candidate.name: one.problem or f"{one.error:.2e}" for one in findings
        }
    refused = {one.candidate.name for one in [*found, *chunks] if one.attend is None}
    bench.candidates = [one for one in candidates if one.name not in refused]


def verdict_of(finding: Finding, tolerance: float) -> str:
    return finding.problem or f"right: {finding.error:.1e} from float32, {tolerance:.0e} allowed"


def loaded(bench: Bench) -> dict[str, Attend]:
    """Return the candidates that were found right, each in its fastest form."""
    heads, long = bench.plan.shapes["8B"]["num_attention_heads"], bench.plan.contexts[0]
    kernels = {one.name: one.load() for one in bench.candidates}
    for attend in kernels.values():
        if isinstance(attend, Tunable):
            cache = KVCache(layout_of(bench, "8B", 1), long // PAGE, PAGE)
            attend.tune(tile_timings(cache, heads, PAGE, long), bench.kernel_ms)
    return kernels


def kernels_against_bytes(bench: Bench) -> None:
    """Time one layer of the 8B on sequences of one run each, as shares of the bytes' least time."""
    plan, kernels = bench.plan, loaded(bench)
    bench.report["kernels"] = []
    for context in plan.contexts:
        for batch in (1, 4):
            for rows in (1, 8, 16):
                told = f"{batch} x {context} keys, {rows} rows"
                shape = [Rows(context - rows, rows)] * batch
                against_bytes(bench, kernels, told, shape, tables_of(context, batch))
    long, short = plan.contexts[0], plan.draft_context
    mixed = [PageTable([Run(0, long // PAGE)], PAGE)]
    mixed += [
        PageTable([Run((long + i * short) // PAGE, (long + (i + 1) * short) // PAGE)], PAGE)
        for i in range(5)
    ]
    for rows in (1, 8):
        shape = [Rows(table.num_tokens - rows, rows) for table in mixed]
        told = f"1 x {long} among 5 x {short} keys, {rows} rows"
        against_bytes(bench, kernels, told, shape, mixed)
        asked = questions_of(long)
        shape = [Rows(long - rows, rows)] * len(asked)
        told = f"6 questions on one document of {long} keys, {rows} rows"
        against_bytes(bench, kernels, told, shape, asked)


def against_bytes(
    bench: Bench,
    kernels: dict[str, Attend],
    told: str,
    shape: list[Rows],
    tables: list[PageTable],
) -> None:
    """Time one case with every candidate."""
    bench.check_time(5, "kernels")
    heads = bench.plan.shapes["8B"]["num_attention_heads"]
    last = max(run.stop for table in tables for run in table.runs)
    cache = KVCache(layout_of(bench, "8B", 1), last, PAGE)
    for tensor in cache.layers[0]:
        tensor.normal_()
    case = make_case("", cache, shape, tables, heads)
    least = case.kv_bytes / bench.peak()[0] * 1e3
    times = {}
    for name, attend in kernels.items():
        if name == "runs, written out" and shape[0].past > 8192:
            continue  # would take seconds
        try:
            times[name] = bench.kernel_ms(partial(case.run, attend))
        except Exception as error:
            bench.say(f"{name}, {told}", told_of(error))
    if not times:
        return
    best = min(times, key=lambda name: times[name])
    bench.report["kernels"].append({"case": told, "ms": times})
    bench.say(
        f"attention, {told}",
        f"{best} {times[best]:.3f} ms = {least / times[best]:.0%} of the bytes"
        + "".join(f"; {name} {ms:.3f}" for name, ms in times.items() if name != best),
    )


def prefill_kernels(bench: Bench) -> None:
    """Time one layer's attention of a chunk at the end of the longest context."""
    plan, kernels = bench.plan, loaded(bench)
    sizes, long = plan.shapes["8B"], plan.contexts[0]
    cache = KVCache(layout_of(bench, "8B", 1), long // PAGE, PAGE)
    for tensor in cache.layers[0]:
        tensor.normal_()
    shape = [Rows(long - plan.chunk, plan.chunk)]
    case = make_case("", cache, shape, tables_of(long, 1), sizes["num_attention_heads"])
    operations = 4 * sizes["hidden_size"] * plan.chunk * (long - plan.chunk / 2)
    results = bench.report["prefill kernels"] = {}
    for one in bench.candidates:
        if not one.is_for_chunks or (one.name == "runs, written out" and long > 8192):
            continue
        bench.check_time(5, "prefill kernels")
        results[one.name] = ms = bench.kernel_ms(partial(case.run, kernels[one.name]))
        share = operations / ms * 1e3 / bench.peak()[1]
        bench.say(
            f"{one.name}, a chunk of {plan.chunk} after {long - plan.chunk} keys",
            f"{ms:.2f} ms = {share:.0%} of the dense peak",
        )


# --- steps ----------------------------------------------------------------------------------------


@dataclass
class Served:
    """A model over a pool of random KV."""

    bench: Bench
    name: str
    model: Any
    cache: KVCache
    kernels: Kernels
    max_context: int

    def runner(self, is_captured: bool = True) -> Runner:
        runner = Runner(
            self.model, self.cache, self.bench.device, self.bench.plan.vocab_size, self.kernels
        )
        if is_captured and self.bench.is_cuda:
            runner.capture_steps(self.max_context, GraphCapture())
        return runner

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a step reads: all but the embedding, unless it is the head."""
        embedding = self.model.model.embed_tokens.weight
        total = sum(p.numel() * p.element_size() for p in self.model.parameters())
        is_tied = embedding is self.model.lm_head.weight
        return total - (0 if is_tied else embedding.numel() * embedding.element_size())

    def least_ms(self, context: int, batch: int) -> float:
        """Return the least milliseconds of a step, which are its bytes over the bandwidth."""
        keys = self.cache.layers[0][0]
        per_token = 2 * len(self.cache.layers) * keys.shape[0] * keys.shape[2] * keys.element_size()
        return (self.weight_bytes + batch * context * per_token) / self.bench.peak()[0] * 1e3

    def feeds(
        self,
        context: int,
        batch: int,
        rows: int,
        wanted: int | None = None,
        tables: list[PageTable] | None = None,
    ) -> list[Feed]:
        ids = np.random.default_rng(0).integers(4, self.bench.plan.vocab_size, (batch, rows))
        wanted = rows if wanted is None else wanted
        return [
            Feed(own.tolist(), context - rows, table, wanted)
            for own, table in zip(ids, tables or tables_of(context, batch), strict=True)
        ]


def questions_of(context: int, number: int = 6) -> list[PageTable]:
    """Return the pages of questions that share all but their last pages."""
    own = 4
    shared = context // PAGE - own
    return [
        PageTable([Run(0, shared), Run(shared + i * own, shared + (i + 1) * own)], PAGE)
        for i in range(number)
    ]


def tables_of(context: int, batch: int) -> list[PageTable]:
    each = context // PAGE
    return [PageTable([Run(i * each, (i + 1) * each)], PAGE) for i in range(batch)]


def serve(
    bench: Bench,
    name: str,
    num_tokens: int,
    max_context: int,
    layers: int = 0,
    *,
    method: Method | None = None,
    is_fp8: bool = False,
) -> Served:
    """Make a model with random weights on the device, a full pool, and an engine's attention.

    Its weights may be quantized, and its keys and values kept in fp8.
    """
    sizes = bench.plan.shapes[name] | ({"num_hidden_layers": layers} if layers else {})
    config = LlamaConfig(
        **sizes, vocab_size=bench.plan.vocab_size, max_position_embeddings=max_context + PAGE
    )
    config._attn_implementation = attention.NAME
    before = torch.get_default_dtype()
    torch.set_default_dtype(bench.dtype)
    try:
        with torch.device(bench.device):
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    if method is not None:
        quantize(model, method, bench.device)
    decoder_of(model)  # fuses its weights while there is room for both copies
    num_pages = num_tokens // PAGE + padding_pages(PAGE)
    layout = replace(layout_of(bench, name, sizes["num_hidden_layers"]), is_fp8=is_fp8)
    cache = KVCache(layout, num_pages, PAGE)
    kernels = choose_kernels(
        cache,
        sizes["num_attention_heads"],
        PAGE,
        max_context,
        bench.plan.chunk,
        bench.candidates,
        bench.kernel_ms,
    )
    for layer in cache.layers:
        for tensor in layer:
            randomise(tensor)
    return Served(bench, name, model, cache, kernels, max_context)


def most_sequences(bench: Bench, context: int) -> int:
    """Return how many of the 8B's sequences fit beside both models (19 GB), the drafts' pool and
    the workspace.
    """
    weights_and_workspace = 26e9 if bench.is_cuda else 0
    room = 0.95 * bench.free_bytes() - weights_and_workspace
    return int(room // (context * layout_of(bench, "8B").bytes_per_token))


def steps(bench: Bench) -> None:
    """Time the steps of the target, then those of the drafters."""
    plan = bench.plan
    long = plan.contexts[0]
    most = min(most_sequences(bench, long), max(plan.batches))
    if most < 1:
        raise OutOfTime("no memory for one sequence")
    target = bench.models["8B"] = serve(bench, "8B", most * long, long)
    target_steps(bench, target, most)
    document_steps(bench, target)
    # The 8B also drafts, with the same weights, on sequences of its own at the start of the pool.
    draft_steps(bench, target)
    room = max(plan.batches) * plan.draft_context
    drafter = bench.models["1B"] = serve(bench, "1B", room, plan.draft_context)
    draft_steps(bench, drafter)


def target_steps(bench: Bench, target: Served, most: int) -> None:
    """Time the target's steps through the runner that engines use."""
    plan, times = bench.plan, bench.step_ms
    results = bench.report["steps"] = []
    before = bench.driver_bytes()
    runner, ordinary = target.runner(), target.runner(is_captured=False)
    for context in plan.contexts:
        room = most * plan.contexts[0] // context
        batches = [batch for batch in plan.batches if batch <= room]
        for batch in plan.batches:
            if batch > room:
                bench.say(f"8B, {batch} x {context}", f"skipped (memory holds {room})")
        for batch in batches:
            is_main = context == plan.contexts[0] and batch in (1, min(4, max(batches)))
            for rows in plan.rows if is_main else (1, 8):
                bench.check_time(15, "steps")
                feeds = target.feeds(context, batch, rows)
                run = partial(runner.run, feeds)
                ms = times[context, batch, rows] = bench.wall_ms(run, warm=6)
                results.append([context, batch, rows, ms])
                least = target.least_ms(context, batch)
                beside = ""
                if rows in (1, 8):
                    eager = bench.wall_ms(partial(ordinary.run, feeds))
                    beside = f"; ordinary {eager:.2f} ms"
                if rows > 1:
                    beside += f"; {ms / times[context, batch, 1]:.2f}x of decoding 1"
                bench.say(
                    f"8B, {batch} x {context}, {'decode' if rows == 1 else f'verify {rows}'}",
                    f"{ms:.2f} ms = {least / ms:.0%} of the bytes' speed{beside}",
                )
    shapes = {(batch, rows) for _, batch, rows in times}
    each = (bench.driver_bytes() - before) / len(shapes) / 2**20
    bench.say(f"the driver's memory for {len(shapes)} shapes of steps", f"{each:.0f} MiB each")


def document_steps(bench: Bench, target: Served) -> None:
    """Time the steps of six questions on one document, whose keys are to be read once."""
    long = bench.plan.contexts[0] - 6 * 4 * PAGE  # the pool may hold one sequence only
    tables, runner = questions_of(long), target.runner()
    for rows in (1, 8):
        bench.check_time(15, "document steps")
        feeds = target.feeds(long, len(tables), rows, tables=tables)
        ms = bench.wall_ms(partial(runner.run, feeds), warm=6)
        least = target.least_ms(long, 1)
        bench.say(
            f"8B, 6 questions on one document of {long}, {rows} rows",
            f"{ms:.2f} ms = {ms / least:.2f}x of the bytes' time",
            "<= 1.35x (9 ms on an H200)" if rows == 1 else "",
            ms <= 1.35 * least if rows == 1 else None,
        )


def draft_steps(bench: Bench, drafter: Served) -> None:
    """Time the forward of one drafted token by batch, on the short context."""
    times = bench.draft_ms[drafter.name] = {}
    bench.report[f"draft steps, {drafter.name}"] = times
    runner, ordinary = drafter.runner(), drafter.runner(is_captured=False)
    for batch in bench.plan.batches:
        bench.check_time(10, "draft steps")
        feeds = drafter.feeds(bench.plan.draft_context, batch, 1)
        times[batch] = bench.wall_ms(partial(runner.run, feeds), warm=6)
        eager = bench.wall_ms(partial(ordinary.run, feeds))
        least = drafter.least_ms(bench.plan.draft_context, batch)
        bench.say(
            f"drafter {drafter.name}, {batch} x {bench.plan.draft_context}, one token",
            f"{times[batch]:.2f} ms = {least / times[batch]:.0%} of the bytes' speed; "
            f"ordinary {eager:.2f} ms",
        )


# --- speedups -------------------------------------------------------------------------------------


def sequential(k: int, plain_ms: float, draft_ms: float, verify_ms: float) -> float:
    times = {"target_s": plain_ms, "draft_s": draft_ms, "verify_s": verify_ms}
    return sequential_speedup(expected_tokens(ACCEPTANCE, k), k, **times)


def ahead(k: int, plain_ms: float, draft_ms: float, verify_ms: float) -> float:
    """Return the speedup of drafting ahead, as if all were accepted, on a device of its own."""
    times = {"target_s": plain_ms, "draft_s": draft_ms, "verify_s": verify_ms}
    return draft_ahead_speedup(expected_tokens(ACCEPTANCE, k), k, ACCEPTANCE**k, **times)


def verify_ms(times: dict[tuple[int, int, int], float], context: int, batch: int, k: int) -> float:
    """Return the time of verifying, as measured or interpolated between the measured neighbours."""
    known = sorted(rows for c, b, rows in times if (c, b) == (context, batch))
    points = [times[context, batch, rows] for rows in known]
    return float(np.interp(k, known, points))


def best(
    speedup: Callable[[int, float, float, float], float],
    times: dict[tuple[int, int, int], float],
    context: int,
    batch: int,
    draft_ms: float,
) -> tuple[int, float]:
    """Return the best draft length and its speedup, from measured times."""
    plain = times[context, batch, 1]
    lengths = range(1, max(rows for c, b, rows in times if (c, b) == (context, batch)) + 1)
    found = {k: speedup(k, plain, draft_ms, verify_ms(times, context, batch, k)) for k in lengths}
    length = max(found, key=lambda k: found[k])
    return length, found[length]


def roofline_speedup(target: Served, drafter: Served, context: int, batch: int) -> float:
    plain = target.least_ms(context, batch)
    draft = drafter.least_ms(target.bench.plan.draft_context, batch)
    return max(sequential(k, plain, draft, plain) for k in range(1, 17))


def rounds(target: Served, drafter: Served, context: int, batch: int, k: int) -> dict[str, float]:
    """Return milliseconds of a plain token and of a round, with the engines' work beside forwards.

    Drafts are proposed and drawn, blocks are judged, and plain tokens are drawn, each for all
    sequences of a step at once. The accepted tokens are not used, because they mean nothing with
    random weights.
    """
    bench, vocab = target.bench, target.bench.plan.vocab_size
    run_target, run_drafter = target.runner(), drafter.runner()
    plain_feeds = target.feeds(context, batch, 1)
    draft_feeds = drafter.feeds(bench.plan.draft_context, batch, 1)
    block_feeds = target.feeds(context, batch, k)

    def plain() -> None:
        rows = enumerate(run_target.run(plain_feeds))
        answered([ToDecode(row[0], Draw(SAMPLING, LOSSLESS, choice, 0)) for choice, row in rows])

    def one_round() -> None:
        drawn: list[list[tuple[Any, Any, int]]] = [[] for _ in range(batch)]
        for position in range(k):
            asked = [
                ToPropose(logits[0], Draw(SAMPLING, LOSSLESS, choice, position))
                for choice, logits in enumerate(run_drafter.run(draft_feeds))
            ]
            for block, one in zip(drawn, answered(asked), strict=True):
                block.append((one.candidate_ids, one.candidate_probs, one.token))
        answered(
            [
                ToJudge(block_of(drawn[choice], choice), logits, first_of(choice), {vocab})
                for choice, logits in enumerate(run_target.run(block_feeds))
            ]
        )

    def judging() -> None:
        answered(blocks)

    def first_of(choice: int) -> Draw:
        return Draw(SAMPLING, LOSSLESS, choice, 0)

    blocks = []
    for choice, logits in enumerate(run_target.run(block_feeds)):
        ids, probs = proposal(logits[0], first_of(choice))
        block = block_of([(ids, probs, int(ids[0]))] * k, choice)
        blocks.append(ToJudge(block, logits.clone(), first_of(choice), {vocab}))
    return {
        "plain": bench.wall_ms(plain, warm=6),
        "round": bench.wall_ms(one_round, warm=6),
        "judging the blocks": bench.wall_ms(judging),
    }


def block_of(drawn: Sequence[tuple[Any, Any, int]], choice: int) -> DraftBlock:
    width = max(len(ids) for ids, _, _ in drawn)
    candidate_ids = np.full((len(drawn), width), -1, dtype=np.int32)
    candidate_probs = np.zeros((len(drawn), width), dtype=np.float32)
    for row, (ids, probs, _) in enumerate(drawn):
        candidate_ids[row, : len(ids)], candidate_probs[row, : len(ids)] = ids, probs
    return DraftBlock(
        lease_id="",
        choice=choice,
        position=0,
        token_ids=np.asarray([token for *_, token in drawn], dtype=np.int32),
        candidate_ids=candidate_ids,
        candidate_probs=candidate_probs,
        draft_ms=0.0,
    )


def speedups(bench: Bench) -> None:
    """Report the numbers that have goals; acceptance is synthetic in all that involve drafts."""
    context, times = bench.plan.contexts[0], bench.step_ms
    # These are the batches whose steps were measured at every number of rows.
    batches = sorted({b for c, b, rows in times if c == context and rows == max(bench.plan.rows)})
    if not batches:
        raise OutOfTime("no step times")
    target, large = bench.models["8B"], max(batches)
    for batch in batches:
        ratio = verify_ms(times, context, batch, 8) / times[context, batch, 1]
        bench.say(
            f"verify 8 over decode 1, {batch} x {context}", f"{ratio:.2f}", "<= 1.15", ratio <= 1.15
        )
    share = target.least_ms(context, large) / times[context, large, 1]
    bench.say(
        f"plain against the bytes, {large} x {context}", f"{share:.0%}", ">= 60 %", share >= 0.6
    )
    pairs = [(name, b) for name in bench.draft_ms for b in batches if b in bench.draft_ms[name]]
    for name, batch in pairs:
        modelled_speedups(bench, name, batch, is_large=batch == large)
    for name, batch in reversed(pairs):  # the 1B's first, since it has a goal
        bench.check_time(20, "rounds")
        measured_speedup(bench, name, batch)


def modelled_speedups(bench: Bench, name: str, batch: int, *, is_large: bool) -> None:
    """Report speedups modelled from the measured steps alone."""
    context, times = bench.plan.contexts[0], bench.step_ms
    target, drafter, draft_ms = bench.models["8B"], bench.models[name], bench.draft_ms[name][batch]
    told = f"{name} drafter, {batch} x {context}"
    k, modelled = best(sequential, times, context, batch, draft_ms)
    limit = roofline_speedup(target, drafter, context, batch)
    bench.say(
        f"sequential, forwards only, {told}",
        f"{modelled:.2f}x at {k} of at best {limit:.2f}x by bytes ({MARK})",
        ">= 80 % of the bytes' speedup" if is_large else "",
        modelled >= 0.8 * limit if is_large else None,
    )
    k, modelled = best(ahead, times, context, batch, draft_ms)
    is_asked = is_large and name == "1B"
    bench.say(
        f"draft-ahead, own GPU, {told}",
        f"{modelled:.2f}x at {k} (modelled from these steps; {MARK})",
        ">= 2.3x" if is_asked else "",
        modelled >= 2.3 if is_asked else None,
    )


def measured_speedup(bench: Bench, name: str, batch: int) -> None:
    """Report the speedup of whole rounds, at the draft length that is best by the steps."""
    context, draft_ms = bench.plan.contexts[0], bench.draft_ms[name][batch]
    k, _ = best(sequential, bench.step_ms, context, batch, draft_ms)
    ms = rounds(bench.models["8B"], bench.models[name], context, batch, k)
    measured = expected_tokens(ACCEPTANCE, k) * ms["plain"] / ms["round"]
    bench.report.setdefault("rounds", []).append(
        {"drafter": name, "batch": batch, "draft_length": k, "ms": ms}
    )
    is_asked = name == "1B" and batch == 1
    bench.say(
        f"sequential, whole rounds, {name} drafter, {batch} x {context}",
        f"{measured:.2f}x at {k}: a round {ms['round']:.1f} ms, a plain token "
        f"{ms['plain']:.1f}, judging the blocks {ms['judging the blocks']:.1f} ({MARK})",
        ">= 1.2x" if is_asked else "",
        measured >= 1.2 if is_asked else None,
    )


# --- prefill and slices ---------------------------------------------------------------------------


def prefill(bench: Bench) -> None:
    """Time a short prompt as it is, and the longest from chunks at five places (so marked)."""
    if "8B" not in bench.models:
        raise OutOfTime("no model")
    target = bench.models["8B"]
    plan, runner = bench.plan, target.runner(is_captured=False)
    sizes = plan.shapes["8B"]
    _, peak_flops = bench.peak()

    def chunk_ms(past: int) -> float:
        bench.check_time(10, "prefill")
        feeds = target.feeds(past + plan.chunk, 1, plan.chunk, wanted=0)
        return bench.wall_ms(partial(runner.run, feeds))

    short, long = plan.contexts[-1], plan.contexts[0]
    chunk_ms(0)
    start = time.perf_counter()
    for past in range(0, short, plan.chunk):
        runner.run(target.feeds(past + plan.chunk, 1, plan.chunk, wanted=0))
    bench.wait()
    bench.say(f"prefill of {short} tokens", f"{time.perf_counter() - start:.2f} s")
    places = [round(i / 4 * (long - plan.chunk) / plan.chunk) * plan.chunk for i in range(5)]
    times = [chunk_ms(past) for past in places]
    between = np.diff(places) / plan.chunk * (np.asarray(times[1:]) + times[:-1]) / 2
    total = float(between.sum() + (times[0] + times[-1]) / 2) / 1e3
    matrices = target.weight_bytes / bench.dtype.itemsize - plan.vocab_size * sizes["hidden_size"]
    attended = 2 * long**2 * sizes["hidden_size"] * sizes["num_hidden_layers"]
    share = (2 * matrices * long + attended) / total / peak_flops
    bench.report["prefill"] = {"places": places, "chunk_ms": times, "seconds": total}
    bench.say(
        f"prefill of {long} tokens, from chunks of {plan.chunk} at five places",
        f"{total:.1f} s = {share:.0%} of the dense peak",
    )


def slices(bench: Bench) -> None:
    """Extrapolate the 70B as drafter and target, in bfloat16 and in four bits."""
    extrapolate(bench, None)
    extrapolate(replace(bench, dtype=torch.bfloat16), "int4")


def extrapolate(bench: Bench, method: Method | None) -> None:
    """Extrapolate from two depths, as every layer costs the same."""
    plan, kind = bench.plan, f" in {method}" if method else ""
    bench.models.clear()
    bench.free_bytes()
    few, many = plan.slice_layers
    depth = plan.shapes["70B"]["num_hidden_layers"]
    context = plan.contexts[0]
    num_tokens = max(context, 4 * plan.draft_context)
    served = serve(bench, "70B", num_tokens, context, many, method=method)
    layers_of = served.model.model.layers
    report = bench.report[f"70B{kind}"] = []
    for tokens, batch, rows in (
        (plan.draft_context, 1, 1),
        (plan.draft_context, 4, 1),
        (context, 1, 1),
        (context, 1, 8),
    ):
        bench.check_time(15, "70B")
        feeds = served.feeds(tokens, batch, rows)
        ms = {}
        for layers in (few, many):
            served.model.config.num_hidden_layers = layers
            served.model.model.layers = layers_of[:layers]
            ms[layers] = bench.wall_ms(partial(served.runner().run, feeds), warm=6)
        each = (ms[many] - ms[few]) / (many - few)
        whole = ms[many] + (depth - many) * each
        report.append({"context": tokens, "batch": batch, "rows": rows, "ms": whole})
        bench.say(
            f"70B{kind}, {batch} x {tokens}, {rows} rows",
            f"{whole:.1f} ms, extrapolated to {depth} layers from {few} and {many}",
        )


def quantized_products(bench: Bench) -> None:
    """Time gate and up of a 70B's layer by rows; check those of four bits, and what converts them.

    Beyond `MOST_PACKED_ROWS` weights of four bits are converted first. Both ways are timed.
    """
    bench.models.clear()
    bench.free_bytes()
    sizes = bench.plan.shapes["70B"]
    shape = (2 * sizes["intermediate_size"], sizes["hidden_size"])
    weight = (torch.randn(shape, device=bench.device) / 50).bfloat16()
    has_fp8 = not bench.is_cuda or torch.cuda.get_device_capability() >= FP8_CAPABILITY
    methods: tuple[Method, ...] = ("fp8", "int4") if has_fp8 else ("int4",)
    products = {method: Product(*quantized(weight, method)) for method in methods}
    own, scales = products["int4"].weight, products["int4"].scale
    assert scales is not None
    numbers = four_bits.numbers_of(*four_bits.codes_of(weight)).bfloat16()
    group = shape[1] // len(scales)
    report = bench.report["quantized products"] = []
    for num_rows in (1, 8, 64, 256, 512, 1024, bench.plan.chunk):
        bench.check_time(5, "quantized products")
        rows = torch.randn(num_rows, shape[1], device=bench.device).bfloat16()
        exact = Product(numbers)(rows).float()
        far = float((products["int4"](rows).float() - exact).norm() / exact.norm())
        times = {"bfloat16": bench.kernel_ms(partial(Product(weight), rows))}
        for method, product in products.items():
            times[method] = bench.kernel_ms(partial(product, rows))
        packed = partial(four_bits._multiply, rows, own, group, scales)
        converted = partial(four_bits.product_of_converted, rows, own, scales)
        times["int4, packed"] = bench.kernel_ms(packed)
        times["int4, converted"] = bench.kernel_ms(converted)
        report.append({"rows": num_rows, "ms": times, "int4 off by": far})
        bench.say(
            f"{shape[0]} x {shape[1]} weights, {num_rows} rows",
            "; ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
            + f"; int4 {far:.1e} from its numbers",
            "int4 <= 1e-2 from its numbers",
            far <= 1e-2,
        )


def keys_in_fp8(bench: Bench) -> None:
    """Time steps of the 8B whose keys and values are kept in fp8."""
    bench.models.clear()
    bench.free_bytes()
    long = bench.plan.contexts[0]
    served = serve(bench, "8B", long, long, is_fp8=True)
    runner, least = served.runner(), served.least_ms(long, 1)
    report = bench.report["KV in fp8"] = {}
    for rows in (1, 8):
        bench.check_time(15, "KV in fp8")
        report[rows] = ms = bench.wall_ms(partial(runner.run, served.feeds(long, 1, rows)), warm=6)
        beside = bench.step_ms.get((long, 1, rows))
        told = f"; {beside:.2f} ms with KV in its dtype" if beside else ""
        bench.say(
            f"8B with KV in fp8, 1 x {long}, {rows} rows",
            f"{ms:.2f} ms = {least / ms:.0%} of the bytes' speed{told}",
        )


# --- all of it ------------------------------------------------------------------------------------


def device_facts(bench: Bench) -> None:
    size = 2**30 if bench.is_cuda else 2**22
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    ms = bench.kernel_ms(lambda: target.copy_(source))
    bench.report["copy_bytes_per_s"] = 2 * size / ms * 1e3
    if bench.is_cuda:
        bench.report["device"] = torch.cuda.get_device_name(bench.device)
    bench.report["torch"] = torch.__version__
    bandwidth, _ = bench.peak()
    bench.say(
        f"device {bench.report.get('device', 'cpu')}, torch {torch.__version__}",
        f"copies at {2 * size / ms / 1e6:.0f} GB/s; bytes are counted at {bandwidth / 1e9:.0f}",
    )


def measure(bench: Bench) -> None:
    """Run all parts in order; each leaves in `bench` what the next ones need."""
    bench.part("device", 0, device_facts)
    bench.part("1. correctness of attention, before anything else", 0, correctness)
    if not bench.candidates:
        bench.say("everything else", "skipped: no attention was found right here")
        return
    bench.part("2. attention against the bytes it reads", 30, kernels_against_bytes)
    bench.part("3. steps of the target and of drafters", 60, steps)
    bench.part("4. speedups", 5, speedups)
    bench.part("5. prefill", 40, prefill)
    bench.part("5. prefill, attention alone", 15, prefill_kernels)
    bench.part("6. Llama-3.1-70B by a slice", 60, slices)
    bench.part("7. products with quantized weights", 20, quantized_products)
    bench.part("8. keys and values in fp8", 30, keys_in_fp8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9, help="of the whole run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/gpu.json")
    parser.add_argument("--without", action="append", default=[], help="leave out a candidate")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="  %(message)s", stream=sys.stdout)
    logging.getLogger("rapid").setLevel(logging.INFO)
    if not arguments.smoke and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible; --smoke runs tiny shapes on the CPU")
    torch.manual_seed(0)
    bench = Bench(
        plan=SMOKE if arguments.smoke else Plan(),
        device=torch.device("cpu" if arguments.smoke else "cuda:0"),
        dtype=torch.float32 if arguments.smoke else torch.bfloat16,
        deadline=STARTED + 60 * arguments.minutes,
        candidates=[one for one in all_candidates(PAGE) if one.name not in arguments.without],
        out=arguments.out,
    )
    # A part that takes longer than announced is interrupted at the deadline, or by SIGTERM.
    signal.signal(signal.SIGALRM, out_of_time)
    signal.signal(signal.SIGTERM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, bench.deadline - time.monotonic()))
    try:
        with torch.inference_mode():
            measure(bench)
    except OutOfTime as over:
        bench.say("the rest", f"skipped ({over})")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        show(bench)


def show(bench: Bench) -> None:
    """Print the table of all results."""
    if bench.spreads:
        told = f"median {statistics.median(bench.spreads):.0%}, worst {max(bench.spreads):.0%}"
        bench.say(f"(most - least) of {bench.plan.repeats} repeats, over their median", told)
    bench.save()
    print(f"\nwritten to {bench.out}\n\n| what | measured | asked | |\n|---|---|---|---|")
    for line in bench.lines:
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
