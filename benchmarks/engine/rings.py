"""KV of models with sliding windows: what engines hold in rings and pages, against pages alone.

    python -m benchmarks.engine.rings

Counted, on any machine: the tensors that an engine of these settings makes are made without memory
behind them, once as planned and once with pages for all layers, and their bytes are compared.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rapid.config import EngineConfig
from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.planning.ring_sizes import ring_plan

CONTEXTS = (8192, 32768, 131072)
LEASES = 6
GIB = 2**30
# Layers, those of them that slide, window, key and value heads, width of a head, and positions, as
# in each repository's config.json.
MODELS = {
    "google/gemma-3-1b-it": (26, 22, 512, 1, 256, 32768),
    "google/gemma-3-4b-it": (34, 29, 1024, 4, 256, 131072),
    "google/gemma-3-12b-it": (48, 40, 1024, 8, 256, 131072),
    "google/gemma-3-27b-it": (62, 52, 1024, 16, 128, 131072),
    "mistralai/Mistral-7B-v0.1": (32, 32, 4096, 8, 128, 32768),
}


def held(layout: KVLayout, context: int) -> int:
    """Bytes of an engine's KV for so many sequences of a length."""
    config = EngineConfig(
        model="any", kv_cache_tokens=LEASES * context, max_leases=LEASES, step_tokens=4096
    )
    plan = ring_plan(config, layout.window)
    num_ring_slots = 0 if plan is None else plan.num_tokens
    num_pages = config.kv_cache_tokens // config.page_tokens
    cache = KVCache(layout, num_pages, config.page_tokens, num_ring_slots=num_ring_slots)
    return sum(stack.nbytes for stack in cache.stacks)


def main() -> None:
    """Print a table in Markdown."""
    print(f"KV of {LEASES} sequences in bfloat16, GiB: pages for all layers -> with rings\n")
    print("| model | " + " | ".join(f"{context:,} tokens each" for context in CONTEXTS) + " |")
    print("| --- |" + " --- |" * len(CONTEXTS))
    for name, (layers, sliding, window, heads, head_dim, most) in MODELS.items():
        slides = tuple(index < sliding for index in range(layers))
        devices = (torch.device("meta"),) * layers
        layout = KVLayout(heads, head_dim, torch.bfloat16, devices, window=window, sliding=slides)
        cells = []
        for context in CONTEXTS:
            if context > most:
                cells.append("beyond its positions")
                continue
            now = held(layout, context)
            pages = held(replace(layout, window=None, sliding=()), context)
            cells.append(f"{pages / GIB:.2f} -> {now / GIB:.2f} ({pages / now:.1f} times less)")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
