"""Whether what engines take on the device starts, and agrees with the specification on a CPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.on_gpu.bench import SMOKE, Bench, layout_of
from benchmarks.on_gpu.served import PAGE
from rapid.engines.attention import ragged as attention
from rapid.engines.attention.batch import Feed
from rapid.engines.attention.cuda import choose_kernels
from rapid.engines.attention.survey import KernelCandidate
from rapid.engines.forward.graphs.buckets import padding_pages
from rapid.engines.forward.graphs.cuda_graphs import GraphCapture
from rapid.engines.forward.layers.decoder import layer_kernels_of
from rapid.engines.forward.layers.layer_operations import LayerOperations
from rapid.engines.forward.runner import Runner
from rapid.engines.kv.cache import KVCache, PageRun, PageTable
from rapid.speculation.fast.step import has_kernels

NEAR = 1e-3  # of logits of size 1 in float32
PROMPT, CONTEXT = 40, 64


def agreement(bench: Bench) -> None:
    """Check the kernels of rows and of layers, then the steps of a tiny model, also as graphs."""
    if bench.is_cuda:
        found = has_kernels(bench.device)
        bench.say("kernels that draw and judge", told(found), "as the specification", found)
        plain = LayerOperations(32, 8, 128, 1e-5)
        weights = bench.device, bench.dtype, bench.dtype, 4096, 128
        found = layer_kernels_of(plain, *weights) is not None
        bench.say("kernels of layers", told(found), "as torch's operations", found)
    sizes = SMOKE.shapes["8B"]
    config = LlamaConfig(**sizes, vocab_size=SMOKE.vocab_size, max_position_embeddings=CONTEXT)
    config._attn_implementation = attention.NAME
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    tiny = replace(bench, plan=SMOKE, dtype=torch.float32)
    own = tiny_steps(tiny, copy.deepcopy(model).to(bench.device), bench.candidates)
    by_specification = tiny_steps(replace(tiny, device=torch.device("cpu")), model, [])
    far = float((own - by_specification).abs().max())
    bench.say("steps of a tiny model against a CPU's", f"{far:.1e}", f"<= {NEAR:.0e}", far <= NEAR)


def told(is_right: bool) -> str:
    return "right" if is_right else "wrong or missing: see the log above"


def tiny_steps(
    bench: Bench, model: LlamaForCausalLM, candidates: list[KernelCandidate]
) -> torch.Tensor:
    """Return the logits of steps after a random prompt, by `partial` where nothing is chosen."""
    ids = torch.randint(4, SMOKE.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(0))
    cache = KVCache(layout_of(bench, "8B"), CONTEXT // PAGE + padding_pages(PAGE), PAGE)
    kernels = None
    if candidates:
        heads = SMOKE.shapes["8B"]["num_attention_heads"]
        kernels = choose_kernels(cache, heads, PAGE, CONTEXT, CONTEXT, candidates, bench.kernel_ms)
    runner = Runner(model, cache, bench.device, SMOKE.vocab_size, kernels)
    runner.capture_steps(CONTEXT, GraphCapture(), max_sequences=1)
    table = PageTable([PageRun(0, CONTEXT // PAGE)], PAGE)
    runner.run([Feed(ids[:PROMPT].tolist(), 0, table, 0)])
    steps = [Feed([int(ids[place])], place, table, 1) for place in range(PROMPT, CONTEXT)]
    return torch.cat([runner.run([step])[0].cpu() for step in steps])
