"""The attention kernels for CUDA; an engine surveys them at its own shapes when it starts.

* runs: a torch kernel per sequence and run, merged by log-sum-exp (flash-attention 3 on Hopper);
* pages: one call of flash-attn 2 or 3 for the batch. Version 2 takes pages of multiples of 256
  tokens only. Rows are padded on the left: the causal mask aligns the last row with the last key;
* blocks: `rapid.engines.attention.triton_kernel`, which a CUDA graph can capture.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rapid.engines.attention.cases import (
    Case,
    beside_sinks,
    chunk_checks,
    chunk_timings,
    in_window,
    step_checks,
    step_timings,
    tile_timings,
)
from rapid.engines.attention.kernel_inputs import Attend, AttentionInputs, Kernels, PartialKernel
from rapid.engines.attention.ragged import attend_by_runs, blockwise_partial
from rapid.engines.attention.segments import Partial, Segment
from rapid.engines.attention.survey import (
    TOLERANCES,
    KernelCandidate,
    Measure,
    device_ms,
    fastest,
    survey,
)
from rapid.engines.kv.cache import KVCache
from rapid.engines.kv.fp8 import FP8
from rapid.errors import ConfigurationError

logger = logging.getLogger(__name__)


def choose_kernels(
    cache: KVCache,
    num_heads: int,
    page_tokens: int,
    max_context: int,
    step_tokens: int,
    candidates: Sequence[KernelCandidate] | None = None,
    measure: Measure | None = None,
    window: int | None = None,
    *,
    has_sinks: bool = False,
) -> Kernels:
    """Check and time candidates at the shapes of a cache, and log the findings.

    Args:
        cache: KV cache of which one layer is used for timing; the content of that layer is lost.
        max_context: tokens of the longest sequence.
        step_tokens: rows of a prefill chunk.
        candidates: kernels to choose from; None takes `all_candidates`.
        measure: function that times a call in milliseconds; None takes `device_ms`.
        window: number of last keys that rows of sliding layers attend to; None without such layers.
        has_sinks: whether the heads have `AttentionInputs.sinks`.

    Raises:
        ConfigurationError: no candidate is correct.
    """
    layout = cache.layout
    tolerance = TOLERANCES[layout.dtype]
    candidates = all_candidates(page_tokens) if candidates is None else candidates
    measure = measure or device_ms

    def check(cases: list[Case]) -> list[Case]:
        cases = beside_sinks(cases) if has_sinks else cases
        return cases if window is None else cases + in_window(cases, window)

    steps = survey(
        candidates,
        check(step_checks(layout, num_heads, page_tokens)),
        step_timings(cache, num_heads, page_tokens, max_context),
        tolerance,
        measure,
        tile_timings(cache, num_heads, page_tokens, max_context),
    )
    chunks = survey(
        [candidate for candidate in candidates if candidate.is_for_chunks],
        check(chunk_checks(layout, num_heads, page_tokens)),
        chunk_timings(cache, num_heads, page_tokens, max_context, step_tokens),
        tolerance,
        measure,
    )
    best_step, best_chunk = fastest(steps), fastest(chunks)
    for what, found, best in (("steps", steps, best_step), ("prefill", chunks, best_chunk)):
        logger.info(
            "attention for %s: %s (%s)", what, best.candidate.name, "; ".join(map(str, found))
        )
    capturable = [one for one in steps if one.candidate.is_capturable and one.attend is not None]
    assert best_step.attend is not None
    assert best_chunk.attend is not None
    return Kernels(
        best_step.attend,
        best_chunk.attend,
        fastest(capturable).attend if capturable else None,
    )


# --- candidates -----------------------------------------------------------------------------------


def all_candidates(page_tokens: int) -> list[KernelCandidate]:
    """Return every attention kernel for CUDA; the unfused one is always available."""
    by_runs: dict[str, PartialKernel] = {
        "runs, flash": flash_partial,
        "runs, memory-efficient": efficient_partial,
        "runs, written out": float32_partial,
    }
    return [
        *(
            KernelCandidate(name, lambda kernel=kernel: partial(attend_by_runs, kernel=kernel))  # type: ignore[misc]
            for name, kernel in by_runs.items()
        ),
        KernelCandidate("runs, flash-attn 3", _runs_by_flash_attn_3),
        KernelCandidate("pages, flash-attn 2", lambda: _flash_attn_2(page_tokens)),
        KernelCandidate("pages, flash-attn 3", lambda: _flash_attn_3(page_tokens)),
        KernelCandidate("blocks, ours in Triton", _blocks, is_for_chunks=False, is_capturable=True),
    ]


def flash_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Attend with torch's build of flash-attention 2, which splits the keys when rows are few."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return output, lse


def efficient_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Attend with torch's memory-efficient kernel, which also takes float32."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, is_causal, scale=scale
    )
    return output, lse[..., : query.shape[2]]  # without the padding to 32 rows


def float32_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Attend without a fused kernel, in float32."""
    tensors = query.float(), key.float(), value.float()
    return blockwise_partial(*tensors, scale, is_causal=is_causal)


def flash_3_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Attend with flash-attention 3 by the function that torch registers for it."""
    # Torch's own switch (`activate_flash_attention_impl`) puts it in the place of flash-attention 2
    # for the whole process, where the two could not be compared.
    from torch.nn.attention import _fa3

    if key.stride(1) == 0:  # the kernel itself groups heads that share their keys
        key, value = key[:, :1], value[:, :1]
    forward = _fa3._fa3_scaled_dot_product_flash_attention_forward_impl_default
    output, lse, *_ = forward(query, key, value, 0.0, is_causal, False, scale=scale)
    return output, lse


def _runs_by_flash_attn_3() -> Attend:
    from torch.nn.attention import _fa3

    _fa3._fa3_import_module("flash_attn_interface")
    return partial(attend_by_runs, kernel=flash_3_partial)


def _blocks() -> Attend:
    from rapid.engines.attention.triton_kernel import BlockAttention

    return BlockAttention()


def _flash_attn_2(page_tokens: int) -> Attend:
    if page_tokens % 256:
        raise ConfigurationError(f"needs page_tokens in multiples of 256, not {page_tokens}")
    kernel = importlib.import_module("flash_attn").flash_attn_with_kvcache
    return partial(attend_by_pages, kernel=kernel, table_name="block_table", page=page_tokens)


def _flash_attn_3(page_tokens: int) -> Attend:
    kernel = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    return partial(attend_by_pages, kernel=kernel, table_name="page_table", page=page_tokens)


def attend_by_pages(
    inputs: AttentionInputs,
    *,
    kernel: Callable[..., Any],
    table_name: str,
    page: int,
) -> torch.Tensor:
    """Attend (see `Attend`) with a ``flash_attn_with_kvcache``.

    Args:
        kernel: function of a query [sequences, rows, heads, head_dim] and of keys and values
            [pages, page, kv_heads, head_dim].
        table_name: keyword of `kernel` for the table of pages, [sequences, pages].
    """
    keys, values, rows = inputs.keys, inputs.values, inputs.rows
    if keys.dtype == FP8:
        raise ConfigurationError("it does not read fp8 with queries of another dtype")
    if inputs.sinks is not None:
        raise ConfigurationError("it is not given attention sinks")
    pages = rows.once(("pages", keys.device), lambda: _pages(rows.segments, page, keys.device))
    if pages is None:  # spans of a sequence are not whole pages
        return attend_by_runs(inputs, kernel=flash_partial)
    table, lengths, padded, back = pages
    shape = (keys.shape[0], -1, page, keys.shape[2])
    output = kernel(
        inputs.query[0].transpose(0, 1)[padded],
        keys.view(shape).permute(1, 2, 0, 3),
        values.view(shape).permute(1, 2, 0, 3),
        cache_seqlens=lengths,
        softmax_scale=inputs.scale,
        causal=True,
        window_size=(-1, -1) if inputs.window is None else (inputs.window - 1, 0),
        **{table_name: table},
    )
    return torch.as_tensor(output).flatten(0, 1)[back][None]


def _pages(
    segments: list[Segment], page: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the inputs of a paged kernel; None where spans are not whole pages.

    They are the table of pages [sequences, pages], the number of keys of each sequence, the rows
    padded on the left to a rectangle [sequences, rows], and the indices that undo the padding.
    """
    tables = []
    for segment in segments:
        *whole, last = segment.all_spans
        if any(a % page or b % page for a, b in whole) or last[0] % page:
            return None
        pages = [np.arange(a // page, -(-b // page)) for a, b in segment.all_spans]
        tables.append(np.concatenate(pages))
    most = max(segment.stop - segment.start for segment in segments)
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for line, own in zip(table, tables, strict=True):
        line[: len(own)] = own
    padded = [
        max(segment.stop - most + i, segment.start) for segment in segments for i in range(most)
    ]
    back = [
        line * most + most - (segment.stop - segment.start) + i
        for line, segment in enumerate(segments)
        for i in range(segment.stop - segment.start)
    ]
    counted = [sum(b - a for a, b in segment.all_spans) for segment in segments]
    return (
        torch.from_numpy(table).to(device),
        torch.tensor(counted, dtype=torch.int32, device=device),
        torch.tensor(padded, device=device).view(len(segments), most),
        torch.tensor(back, device=device),
    )


# Held while an engine captures a graph: a capture begins by waiting for the device, and that wait
# breaks any other capture in progress.
CAPTURING = threading.Lock()
