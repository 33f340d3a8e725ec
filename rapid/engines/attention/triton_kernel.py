"""Split-KV attention over scattered runs of keys, for CUDA: steps of a whole batch in two launches.

Decoding and verifying at long context are bound by reading KV. So the query rows of a KV group are
packed into one tile, and every key is read once for all of them. The keys of a sequence are divided
among `splits` programs, as in Flash-Decoding (Dao et al., 2023), so that few sequences still fill
the device; a second launch merges their parts by log-sum-exp.

A table (`key_table`) lists the keys in blocks of at most `BLOCK_KEYS` consecutive slots, so that
any runs, pages or windows are walked with strided loads. Lengths, rows and slots are read from that
tensor and never from the host, so that a captured graph can be replayed with new ones.

``TRITON_INTERPRET=1`` runs the same code on a CPU, slowly; the tests use it.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from rapid.engines.attention.rows import AttentionInputs
from rapid.engines.attention.segments import Segment

BLOCK_KEYS = 64
HEADER = 3  # columns of a key table before its blocks
PROGRAMS_PER_PROCESSOR = 4
MAX_SPLITS = 64


def key_table(segments: list[Segment], num_blocks: int | None = None) -> np.ndarray:
    """Return the table of the slots in which the keys of each sequence lie.

    Args:
        segments: sequences with their spans of slots.
        num_blocks: blocks to provide columns for; None takes as many as are needed.

    Returns:
        int32 [sequences, 4 + 2 * num_blocks]. A line holds the first row, the number of rows and
        the number of blocks; the first slot of each block; then the number of keys before each
        block, and their total at the end.

    Raises:
        ValueError: a sequence has more than `num_blocks` blocks.
    """
    lines = [_blocks(segment.all_spans) for segment in segments]
    longest = max(len(slots) for slots, _ in lines)
    num_blocks = longest if num_blocks is None else num_blocks
    if longest > num_blocks:
        raise ValueError(f"{longest} blocks of keys, room for {num_blocks}")
    table = np.zeros((len(segments), HEADER + 2 * num_blocks + 1), dtype=np.int32)
    for line, segment, (slots, before) in zip(table, segments, lines, strict=True):
        line[:HEADER] = segment.start, segment.stop - segment.start, len(slots)
        line[HEADER : HEADER + len(slots)] = slots
        start = HEADER + num_blocks
        line[start : start + len(before)] = before
    return table


def _blocks(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first slot of each block, and the cumulative key counts from 0 to the total."""
    slots = [np.arange(start, stop, BLOCK_KEYS) for start, stop in spans]
    counts = [
        np.minimum(stop - first, BLOCK_KEYS) for first, (_, stop) in zip(slots, spans, strict=True)
    ]
    return np.concatenate(slots), np.concatenate([[0], np.cumsum(np.concatenate(counts))])


def attend_by_blocks(inputs: AttentionInputs) -> torch.Tensor:
    """Compute attention for a batch of steps, as `Attend` defines it.

    The `key_table` is built on the first call for a batch and kept on the device in `rows.memo`.
    """
    rows, device = inputs.rows, inputs.keys.device
    table = rows.once(
        ("key table", device), lambda: torch.from_numpy(key_table(rows.segments)).to(device)
    )
    return attend_to_table(inputs, table)


def attend_to_table(
    inputs: AttentionInputs, table: torch.Tensor, splits: int | None = None
) -> torch.Tensor:
    """Compute causal attention of each sequence's rows, its last positions, to all its keys.

    Args:
        inputs: see `AttentionInputs`; `query` is contiguous in its head_dim, `keys` and `values`
            are in all dimensions.
        table: from `key_table`, on the device; its sequences together cover all rows.
        splits: programs per sequence and KV head, at most `MAX_SPLITS`; None fills the device.

    Returns:
        [1, rows, heads, head_dim].
    """
    query, keys, values = inputs.query, inputs.keys, inputs.values
    _, num_heads, num_rows, head_dim = query.shape
    assert query.stride(3) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    num_sequences, width = table.shape
    num_blocks = (width - HEADER - 1) // 2
    splits = splits or _splits(keys.device, num_sequences * num_kv_heads, num_blocks)
    dim = triton.next_power_of_2(head_dim)
    most_rows = max(segment.stop - segment.start for segment in inputs.rows.segments)
    packed = max(16, triton.next_power_of_2(group * most_rows))
    parts = torch.empty(
        (splits, num_rows, num_heads, head_dim), dtype=torch.float32, device=query.device
    )
    lses = torch.empty((splits, num_rows, num_heads), dtype=torch.float32, device=query.device)
    output = query.new_empty((1, num_rows, num_heads, head_dim))
    with torch.cuda.device_of(query):
        _attend_to_split[(splits, num_kv_heads, num_sequences)](
            query,
            keys,
            values,
            table,
            parts,
            lses,
            inputs.scale,
            query.stride(1),
            query.stride(2),
            keys.stride(0),
            num_rows,
            width,
            num_blocks,
            splits,
            NUM_HEADS=num_heads,
            GROUP=group,
            HEAD_DIM=head_dim,
            DIM=dim,
            PACKED=packed,
            BLOCK=BLOCK_KEYS,
            HEADER=HEADER,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=8 if packed >= 128 else 4,
            num_stages=2 if query.dtype == torch.float32 else 3,
        )
        _merge_splits[(num_rows, num_heads)](
            parts,
            lses,
            output,
            num_rows,
            splits,
            MAX_SPLITS=MAX_SPLITS,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            DIM=dim,
            num_warps=8,
        )
    return output


def _splits(device: torch.device, num_programs: int, num_blocks: int) -> int:
    """Return the number of programs per sequence and KV head.

    It is large enough to fill the device, but leaves every program at least one block.
    """
    processors = 8
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // num_programs)
    return min(wanted, num_blocks, MAX_SPLITS)


# Numbers that change from step to step must not make Triton compile the kernels anew.
@triton.jit(do_not_specialize=["num_rows", "width", "num_blocks", "splits"])
def _attend_to_split(
    query,
    keys,
    values,
    table,
    parts,
    lses,
    scale,
    query_head_stride,
    query_row_stride,
    kv_head_stride,
    num_rows,
    width,
    num_blocks,
    splits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute attention for one KV head of one sequence over one share of its blocks."""
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = table + sequence * width
    first_row, own_rows, own_blocks = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    slots = line + HEADER
    before = slots + num_blocks

    packed = tl.arange(0, PACKED)  # row by row, the heads of the group side by side
    row = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    is_row = row < own_rows
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    tile = tl.load(
        query
        + (first_row + row)[:, None] * query_row_stride
        + head[:, None] * query_head_stride
        + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    visible = tl.load(before + own_blocks) - own_rows + row + 1  # keys visible to each row

    best = tl.full([PACKED], float("-inf"), tl.float32)
    total = tl.zeros([PACKED], tl.float32)
    sums = tl.zeros([PACKED, DIM], tl.float32)
    keys += kv_head.to(tl.int64) * kv_head_stride
    values += kv_head.to(tl.int64) * kv_head_stride
    share = tl.cdiv(own_blocks, splits)
    place = tl.arange(0, BLOCK)
    for block in range(split * share, tl.minimum((split + 1) * share, own_blocks)):
        slot = tl.load(slots + block).to(tl.int64) + place
        first = tl.load(before + block)
        is_key = place < tl.load(before + block + 1) - first
        tile_keys = tl.load(
            keys + slot[None, :] * HEAD_DIM + dim[:, None],
            mask=is_key[None, :] & is_dim[:, None],
            other=0.0,
        )
        scores = tl.dot(tile, tile_keys, input_precision=PRECISION) * scale
        is_seen = is_key[None, :] & ((first + place)[None, :] < visible[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(better == float("-inf"), 0.0, better)  # 0 if no key was visible so far
        weights = tl.exp(scores - shift[:, None])
        keep = tl.exp(best - shift)
        tile_values = tl.load(
            values + slot[:, None] * HEAD_DIM + dim[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        total = total * keep + tl.sum(weights, 1)
        sums = sums * keep[:, None] + tl.dot(
            weights.to(tile_values.dtype), tile_values, input_precision=PRECISION
        )
        best = better

    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    place_out = (split * num_rows + first_row + row).to(tl.int64) * NUM_HEADS + head
    tl.store(
        parts + place_out[:, None] * HEAD_DIM + dim[None, :],
        sums / divisor[:, None],
        mask=is_row[:, None] & is_dim[None, :],
    )
    lse = tl.where(is_empty, float("-inf"), best + tl.log(divisor))
    tl.store(lses + place_out, lse, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _merge_splits(
    parts,
    lses,
    output,
    num_rows,
    splits,
    MAX_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merge the splits of one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, MAX_SPLITS)
    is_split = split < splits
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    place = (split * num_rows + row).to(tl.int64) * NUM_HEADS + head
    lse = tl.load(lses + place, mask=is_split, other=float("-inf"))
    weights = tl.exp(lse - tl.max(lse, 0))
    part = tl.load(
        parts + place[:, None] * HEAD_DIM + dim[None, :],
        mask=is_split[:, None] & is_dim[None, :],
        other=0.0,
    )
    merged = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    target = output + (row * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(target, merged.to(output.dtype.element_ty), mask=is_dim)
