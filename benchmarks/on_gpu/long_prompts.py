"""Prefill of Llama-3.1-8B, and the 70B from a slice of its layers."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.on_gpu.bench import Bench, OutOfTime
from benchmarks.on_gpu.steps import serve
from rapid.engines.forward.linear.products import Method


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
