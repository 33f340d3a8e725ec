"""Ragged attention over page runs: many sequences of any length in one forward, no padding.

The rows of a KV group are packed, so that keys are read once, and the parts are merged by their
log-sum-exp. `plain_partial` specifies all kernels.
"""

from __future__ import annotations

import math

import torch
from transformers import AttentionInterface

from rapid.engines.attention import cpu as cpu_attention
from rapid.engines.attention.kernel_inputs import AttentionInputs, PartialKernel, RaggedRows
from rapid.engines.attention.segments import Partial, Segment
from rapid.engines.attention.shared_prefixes import SharedPrefix
from rapid.engines.attention.windows import edge_partial

NAME = "rapid_ragged"
MAX_SCORES = 2**26  # float32 scores held at once where no fused kernel is used


def attend_ragged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    ragged: RaggedRows,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Store the keys and values of ragged rows and attend for them, [1, rows, heads, head_dim].

    The signature is that of transformers' attention functions.

    Args:
        module: attention layer; its `layer_idx` selects the layer of the cache.
        query: [1, heads, rows, head_dim].
        key: [1, kv_heads, rows, head_dim], and `value` likewise.
        attention_mask: always None; the segments of `ragged` define what each row attends to.
        scaling: factor of the scores; None takes ``head_dim ** -0.5``.
        sliding_window: number of last keys, up to itself, that each row attends to; None for all.
        s_aux: `AttentionInputs.sinks`, in any dtype.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    ragged = ragged.of_layer(layer)
    slots = ragged.slots_on(ragged.cache.layers[layer][0].device)
    key, value = ragged.cache.store(layer, slots, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float()
    return attend_to_cache(layer, query, key, value, ragged, scale, sliding_window, sinks), None


def attend_to_cache(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: RaggedRows,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend for rows of a layer, [1, rows, heads, head_dim], whose keys and values are stored.

    Both are as `KVCache.store` returns them; `window` is the `sliding_window` of `attend_ragged`.
    """
    keys, values = rows.cache.layers[layer]
    inputs = AttentionInputs(query, key, value, keys, values, rows, scale, window, sinks)
    kernels = rows.kernels
    if kernels is None:
        inputs = inputs.within_window()
        is_read_in_place = keys.device.type == "cpu" and keys.dtype == query.dtype
        if is_read_in_place and (spans := inputs.rows.single_spans()):
            return cpu_attention.attend_single_rows(inputs, spans)
        return attend_by_runs(inputs)
    if kernels.steps is kernels.chunks:  # in a captured step, which has one table for all rows
        return kernels.steps(inputs)
    outputs = [
        (kernels.steps if part.rows.segments[0].is_step else kernels.chunks)(part)
        for part in inputs.stretches()
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def attend_by_runs(inputs: AttentionInputs, kernel: PartialKernel | None = None) -> torch.Tensor:
    """Compute `Attend` by sequence and by run of keys, reading each shared prefix once.

    With a `kernel` in place of `partial`, each sequence reads shared prefixes on its own.
    """
    inputs = inputs.within_window()
    outputs: dict[int, torch.Tensor] = {}
    for prefix in inputs.rows.prefixes() if kernel is None else ():
        outputs |= _attend_together(inputs, prefix)
    for index, segment in enumerate(inputs.rows.segments):
        if index not in outputs:
            outputs[index] = _attend(inputs, segment, kernel or partial)
    in_order = [outputs[index] for index in range(len(outputs))]
    return in_order[0] if len(in_order) == 1 else torch.cat(in_order, dim=1)


def _attend_together(inputs: AttentionInputs, prefix: SharedPrefix) -> dict[int, torch.Tensor]:
    """Return the outputs [1, rows, heads, d], by index, of the sequences that share a prefix."""
    query = inputs.query
    num_kv_heads, _, head_dim = inputs.keys.shape
    num_heads = query.shape[1]
    by_head = (num_kv_heads, num_heads // num_kv_heads, -1)
    # Their rows are packed as if they were one sequence, so that the prefix is read once.
    rests = prefix.rests.values()
    rows = torch.cat([query[:, :, rest.start : rest.stop] for rest in rests], dim=2)
    packed = rows.reshape(1, num_kv_heads, -1, head_dim)
    output, lse = merge(_over_spans(packed, inputs, prefix.spans, partial))
    own = [merge(_parts(inputs, rest, partial)) for rest in rests]
    own_output = torch.cat([output.reshape(*by_head, head_dim) for output, _ in own], dim=2)
    own_lse = torch.cat([lse.reshape(by_head) for _, lse in own], dim=2)
    shared = output.reshape(*by_head, head_dim), lse.reshape(by_head)
    merged = inputs.share_with_sinks(merge([shared, (own_output, own_lse)]))
    by_row = merged.to(query.dtype).permute(2, 0, 1, 3).reshape(1, -1, num_heads, head_dim)
    split = torch.split(by_row, [rest.stop - rest.start for rest in rests], dim=1)
    return dict(zip(prefix.rests, split, strict=True))


def _attend(inputs: AttentionInputs, segment: Segment, kernel: PartialKernel) -> torch.Tensor:
    """Return the attention of one sequence's rows over its keys, [1, rows, heads, d]."""
    _, num_heads, _, head_dim = inputs.query.shape
    output = inputs.share_with_sinks(merge(_parts(inputs, segment, kernel)))
    by_head = output.to(inputs.query.dtype).reshape(1, num_heads, -1, head_dim)
    return by_head.transpose(1, 2)


def _parts(inputs: AttentionInputs, segment: Segment, kernel: PartialKernel) -> list[Partial]:
    """Return partial attention over each past run and over the rows themselves, packed."""
    own = slice(segment.start, segment.stop)
    query = inputs.query[:, :, own]
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = inputs.keys.shape[0]
    group = num_heads // num_kv_heads
    packed = query.reshape(1, num_kv_heads, group * num_rows, head_dim)
    # A single row attends to itself too: its own slot is one more key and needs no mask.
    spans = segment.all_spans if num_rows == 1 else segment.past
    parts = _over_spans(packed, inputs, spans, kernel)
    if segment.edge:
        read = zip(*inputs.read(segment.edge), strict=True)
        key, value = (torch.cat(tensors, dim=2) for tensors in read)
        parts.append(edge_partial(packed, key, value, inputs.scale, num_rows))
    if num_rows > 1:
        key, value = inputs.key[:, :, own], inputs.value[:, :, own]
        parts.append(attend_to_self(query, key, value, inputs.scale, kernel))
    return parts


def _over_spans(
    packed: torch.Tensor,
    inputs: AttentionInputs,
    spans: list[tuple[int, int]],
    kernel: PartialKernel,
) -> list[Partial]:
    """Return partial attention of packed rows over spans of slots, without a mask."""
    return [
        kernel(packed, key, value, inputs.scale, is_causal=False)
        for key, value in inputs.read_in_any_order(spans)
    ]


def attend_to_self(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    kernel: PartialKernel,
) -> Partial:
    """Attend causally among the new rows and return the result in the packed shape."""
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    # A group's heads become the kernel's heads and the KV heads its batch: keys are expanded by
    # a zero stride, and the mask is [rows, rows], however many heads share it.
    shape = (num_kv_heads, group, num_rows, head_dim)
    grouped = query[0].reshape(shape)
    output, lse = kernel(
        grouped,
        key[0, :, None].expand(shape),
        value[0, :, None].expand(shape),
        scale,
        is_causal=True,
    )
    return (
        output.reshape(1, num_kv_heads, group * num_rows, head_dim),
        lse.reshape(1, num_kv_heads, group * num_rows),
    )


def partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Compute softmax attention [b, h, rows, d] over some of the keys, for `merge`.

    With it, return the log-sum-exp of the scores [b, h, rows].

    Args:
        query: [b, h, rows, d].
        key: [b, h, keys, d], in any strides with d contiguous.
        is_causal: whether row i attends to keys [0, i] only; needs as many keys as rows.
    """
    if query.device.type == "cpu":
        return cpu_attention.partial(query, key, value, scale, is_causal=is_causal)
    return blockwise_partial(query, key, value, scale, is_causal=is_causal)


def blockwise_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Compute `plain_partial` in blocks that hold no more than about `MAX_SCORES` scores at once.

    Without a mask the keys are split into blocks. With the causal mask the rows are: each block
    attends to the keys before it without a mask and to its own keys causally.
    """
    if is_causal:
        return _blockwise_causal(query, key, value, scale)
    block = max(1, MAX_SCORES // query.shape[:-1].numel())
    blocks = zip(torch.split(key, block, dim=2), torch.split(value, block, dim=2), strict=True)
    return merge([plain_partial(query, k, v, scale, is_causal=False) for k, v in blocks])


def _blockwise_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> Partial:
    rows = query.shape[2]
    block = max(1, math.isqrt(MAX_SCORES // query.shape[:2].numel()))
    outputs, lses = [], []
    for start in range(0, rows, block):
        own = slice(start, start + block)
        mine = query[:, :, own]
        parts = [plain_partial(mine, key[:, :, own], value[:, :, own], scale, is_causal=True)]
        if start:
            past = key[:, :, :start], value[:, :, :start]
            parts.append(blockwise_partial(mine, *past, scale, is_causal=False))
        output, lse = merge(parts)
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


def plain_partial(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool
) -> Partial:
    """Compute `partial` from its formula, as the reference and for devices without a kernel."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if is_causal:
        rows = scores.shape[-1]
        future = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(value.dtype)
    return torch.matmul(weights, value), lse


def merge(parts: list[Partial]) -> Partial:
    """Merge attention over disjoint parts of the keys; the output of several parts is float32."""
    output, lse = parts[0]
    for other, other_lse in parts[1:]:
        share = torch.sigmoid(other_lse - lse)[..., None]
        output = torch.lerp(output.float(), other.float(), share)
        lse = torch.logaddexp(lse, other_lse)
    return output, lse


AttentionInterface.register(NAME, attend_ragged)
