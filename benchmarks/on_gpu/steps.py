"""Steps of Llama-3.1-8B and of drafters, ordinary and as captured graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.on_gpu.bench import Bench, OutOfTime, layout_of
from benchmarks.on_gpu.served import PAGE, Served, questions_of
from rapid.engines.attention import ragged as attention
from rapid.engines.attention.cases import randomise
from rapid.engines.attention.cuda import choose_kernels
from rapid.engines.forward.graphs.buckets import padding_pages
from rapid.engines.forward.layers.decoder import decoder_of
from rapid.engines.forward.linear.products import Method, quantize
from rapid.engines.kv.cache import KVCache


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
    bytes_per_s, _ = bench.peak()
    return Served(name, model, cache, kernels, max_context, bench.device, bytes_per_s)


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
        gaps: dict[int, float] = {}  # milliseconds by batch for which the device is idle
        room = most * plan.contexts[0] // context
        batches = [batch for batch in plan.batches if batch <= room]
        for batch in plan.batches:
            if batch > room:
                bench.say(f"8B, {batch} x {context}", f"skipped (memory holds {room})")
        for batch in batches:
            is_main = context == plan.contexts[0] and batch in (1, max(batches))
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
                if rows == 1:
                    number, busy = bench.count_launches(run)
                    gap = gaps[batch] = max(0.0, ms - busy)
                    beside += f"; {number} launches, idle for {gap:.2f} ms"
                    beside += f"; {least / ms * bench.peak()[0] / 1e9:.0f} GB/s"
                if rows > 1:
                    beside += f"; {ms / times[context, batch, 1]:.2f}x of decoding 1"
                bench.say(
                    f"8B, {batch} x {context}, {'decode' if rows == 1 else f'verify {rows}'}",
                    f"{ms:.2f} ms = {least / ms:.0%} of the bytes' speed{beside}",
                )
        if (most_at_once := max(gaps, default=1)) > 1:
            each = max(0.0, gaps[most_at_once] - gaps[1]) / (most_at_once - 1)
            bench.lose("sequence_s", each)
            bench.lose("step_s", gaps[1] - each)
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
