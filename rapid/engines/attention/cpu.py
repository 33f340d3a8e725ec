"""Partial attention on a CPU: torch's fused flash kernel, called in the fastest of three forms.

The forms pass different dimensions as heads and as the batch;
`benchmarks/engine/cpu_attention.py` measures them and `form_for`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rapid.engines.attention.kernel_inputs import AttentionInputs
    from rapid.engines.attention.segments import Partial

MAX_REREAD_BYTES = 2**22  # KV of a head: beyond, the second read comes from memory, not a cache
MIN_SPLIT_KEYS = 8192  # below, merging costs more than idle threads do
MAX_SPLIT_ROWS = 32  # above, the kernel gives a second block of rows to another thread

Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], "Partial"]


def partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Compute `rapid.engines.attention.ragged.partial` in the fastest form for the shapes."""
    if is_causal:
        return attend_packed(query, key, value, scale, is_causal=True)
    return form_for(query, key)(query, key, value, scale)


def attend_single_rows(inputs: AttentionInputs, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Compute attention for sequences with one row and one run of keys, as in plain decoding.

    Of the slots [start, stop) that each row attends to, return [1, rows, heads, head_dim].
    """
    query, keys, values = inputs.query, inputs.keys[None], inputs.values[None]
    _, heads, rows, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    packed = query.transpose(1, 2).reshape(rows, 1, num_kv_heads, heads // num_kv_heads, head_dim)
    outputs = []
    for row, (a, b) in zip(packed.unbind(), spans, strict=True):
        key, value = keys.narrow(2, a, b - a), values.narrow(2, a, b - a)
        part = partial(row, key, value, inputs.scale, is_causal=False)
        outputs.append(inputs.share_with_sinks(part))
    return torch.cat(outputs).to(query.dtype).reshape(1, rows, heads, head_dim)


def form_for(query: torch.Tensor, key: torch.Tensor) -> Form:
    """Return the fastest form for a query [b, h, rows, d] over keys [b, h, keys, d]."""
    batch, heads, rows, _ = query.shape
    if batch != 1:
        return attend_packed
    num_keys, head_dim = key.shape[2:]
    if rows == 2 and query.dtype == torch.bfloat16:
        num_bytes = 2 * num_keys * head_dim * key.element_size()
        if num_bytes <= MAX_REREAD_BYTES:
            return row_by_row
    if heads < torch.get_num_threads() and rows <= MAX_SPLIT_ROWS and num_keys > MIN_SPLIT_KEYS:
        return split
    return attend_packed


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    is_causal: bool = False,
) -> Partial:
    """Compute attention in one call, on the tensors as they are."""
    output, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return output, lse


def row_by_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> Partial:
    """Compute attention with rows as heads and KV heads as batch; query is [1, h, rows, d]."""
    rows = query.shape[2]
    output, lse = attend_packed(
        query[0, :, :, None],
        key[0, :, None].expand(-1, rows, -1, -1),
        value[0, :, None].expand(-1, rows, -1, -1),
        scale,
    )
    return output[None, :, :, 0], lse[None, :, :, 0]


def split(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Partial:
    """Compute attention over equal parts of the keys and merge; query is [1, h, rows, d]."""
    threads = torch.get_num_threads()  # of which each gets as much work
    num_parts = threads // math.gcd(threads, query.shape[1])
    length = key.shape[2] // num_parts
    whole = num_parts * length
    output, lse = attend_packed(
        query.expand(num_parts, -1, -1, -1), _parts(key, length), _parts(value, length), scale
    )
    if whole < key.shape[2]:
        rest = attend_packed(query, key[:, :, whole:], value[:, :, whole:], scale)
        output, lse = torch.cat([output, rest[0]]), torch.cat([lse, rest[1]])
    total = lse.logsumexp(0, keepdim=True)
    return (output * (lse - total).exp()[..., None]).sum(0, keepdim=True), total


def _parts(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return a view [n // length, h, length, d] of a tensor [1, h, n, d]."""
    heads, num_parts = tensor.shape[1], tensor.shape[2] // length
    whole = tensor[0, :, : num_parts * length]
    return whole.view(heads, num_parts, length, -1).transpose(0, 1)
