"""Attention, steps and speedups on one CUDA device, against its memory bandwidth.

The benchmark needs torch and transformers beside this repository. Weights are random at real
shapes, so texts mean nothing and acceptance is synthetic, which every such number says. The parts
run in the order below. A part is skipped with a line when its time or memory is missing, and given
up when it fails. The table of all results comes last, also when time runs out.

1. every attention candidate against float32 (wrong ones are refused before anything is timed), the
   kernels of rows and layers against their specification, a tiny model's steps against a CPU's;
2. steps of Llama-3.1-8B and of drafters (itself, and the 1B), ordinary and as captured graphs:
   against the bytes they must read, their launches, and for how long the device is idle;
3. the speedup over our own plain path in rounds with all that engines do beside forwards, lossless
   and fused with a witness, at all contexts and several temperatures;
4. kernel time of attention against the bytes it must read (8K keys stay in the device's cache),
   also for a long sequence among short ones and for six questions on one document;
5. prefill, whole and its attention alone;
6. what a plan counts beside those: a layer's small operations, Ray's calls, sums over GPUs;
7. Llama-3.1-70B from a slice of its layers, extrapolated, in bfloat16 and in four bits;
8. products of a 70B's layer with quantized weights, those of four bits against their numbers;
9. steps of the 8B with keys and values in fp8.

    python benchmarks/gpu.py [--minutes 9] [--out benchmarks/results/gpu.json] [--without NAME]
    python benchmarks/gpu.py --smoke      # tiny shapes on any machine, to check that it runs
"""

from __future__ import annotations

import argparse
import logging
import platform
import signal
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

STARTED = time.monotonic()


def installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))  # for a machine without an install
try:
    import torch

    from benchmarks.on_gpu.agreement import agreement
    from benchmarks.on_gpu.attention import correctness, kernels_against_bytes, prefill_kernels
    from benchmarks.on_gpu.bench import SMOKE, Bench, OutOfTime, Plan
    from benchmarks.on_gpu.eight_and_four_bits import keys_in_fp8, quantized_products
    from benchmarks.on_gpu.long_prompts import prefill, slices
    from benchmarks.on_gpu.losses import calls_of_a_round, small_operations, sums
    from benchmarks.on_gpu.served import PAGE
    from benchmarks.on_gpu.speedups import speedups
    from benchmarks.on_gpu.steps import steps
    from rapid.engines.attention.cuda import all_candidates
except ImportError as missing:
    has = ", ".join(map(installed, ("torch", "transformers", "numpy", "triton")))
    raise SystemExit(
        f"{missing}: this benchmark runs from a checkout of its repository and needs Python 3.11, "
        f"torch 2.7 and transformers 4.56 or newer; here is Python {platform.python_version()}, "
        f"{has}"
    ) from None


def out_of_time(*_: object) -> None:
    raise OutOfTime("time is up")


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
    bench.part("1. agreement with a CPU", 10, agreement)
    bench.part("2. steps of the target and of drafters", 60, steps)
    bench.part("3. speedups", 5, speedups)
    bench.part("4. attention against the bytes it reads", 30, kernels_against_bytes)
    bench.part("5. prefill", 40, prefill)
    bench.part("5. prefill, attention alone", 15, prefill_kernels)
    bench.part("6. small operations of a layer", 10, small_operations)
    bench.part("6. calls of a round", 15, calls_of_a_round)
    bench.part("6. sums over GPUs", 20, sums)
    bench.part("7. Llama-3.1-70B by a slice", 60, slices)
    bench.part("8. products with quantized weights", 20, quantized_products)
    bench.part("9. keys and values in fp8", 30, keys_in_fp8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9, help="of the whole run")
    parser.add_argument("--out", type=Path, default=FOLDER / "results/gpu.json")
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
