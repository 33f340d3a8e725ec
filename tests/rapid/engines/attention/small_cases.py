"""Small caches and cases for the tests of attention, and a kernel that is right on all of them."""

from __future__ import annotations

import torch

from rapid.engines.attention.cases import Case, step_checks
from rapid.engines.attention.kernel_inputs import AttentionInputs
from rapid.engines.attention.ragged import attend_by_runs, plain_partial
from rapid.engines.kv.cache import KVCache, KVLayout

CPU = torch.device("cpu")
PAGE, KV_HEADS, HEADS, HEAD_DIM = 16, 2, 4, 16


def cache_of(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(KVLayout(KV_HEADS, HEAD_DIM, dtype, (CPU,)), 64, PAGE)


def step_cases(page: int = PAGE) -> list[Case]:
    torch.manual_seed(0)
    return step_checks(cache_of().layout, HEADS, page)


def right(inputs: AttentionInputs) -> torch.Tensor:
    return attend_by_runs(inputs, kernel=plain_partial)


def textbook(inputs: AttentionInputs) -> torch.Tensor:
    """Attention written out in float64: every row, and the keys it may see, on their own."""
    group = inputs.query.shape[1] // inputs.keys.shape[0]
    outputs = []
    for segment in inputs.rows.segments:
        slots = [slot for span in segment.all_spans for slot in range(*span)]
        for row in range(segment.start, segment.stop):
            seen = slots[: len(slots) - (segment.stop - 1 - row)][-(inputs.window or 0) :]
            keys, values = (
                tensor[:, seen].double().repeat_interleave(group, 0)
                for tensor in (inputs.keys, inputs.values)
            )
            scores = (keys @ inputs.query[0, :, row, :, None].double())[..., 0] * inputs.scale
            if inputs.sinks is not None:
                scores = torch.cat([scores, inputs.sinks[:, None].double()], 1)
            weights = scores.softmax(-1)[:, None, : len(seen)]
            outputs.append((weights @ values)[:, 0])
    return torch.stack(outputs)[None].float()
