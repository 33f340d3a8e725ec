"""Attention of a whole batch of steps over scattered runs of keys, for CUDA, in Triton.

All rows that read the same keys form one tile. The keys are divided among programs as in
Flash-Decoding (Dao et al., 2023). Lengths and slots are read from a table, so a captured graph can
be replayed with new ones. ``TRITON_INTERPRET=1`` runs the code on a CPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from rapid.engines.attention.cases import Case
from rapid.engines.attention.kernel_inputs import AttentionInputs
from rapid.engines.attention.key_tables import KeyTables, tiling_on
from rapid.engines.attention.survey import Measure
from rapid.engines.attention.work_items import BLOCK, ITEM, ROW, TILES, Sizes

logger = logging.getLogger(__name__)

MERGED = 16  # parts that the merging launch reads at once
LOG2_E = tl.constexpr(math.log2(math.e))  # the kernels count in powers of 2


class Launch(NamedTuple):
    """Resources of a launch: warps of a program, and stages that Triton pipelines its loop in."""

    num_warps: int
    num_stages: int


# Two buffers of keys and values at three stages; the first is taken without a timing.
LAUNCHES = (Launch(8, 3), Launch(4, 3), Launch(8, 4), Launch(8, 2))
LAUNCHES_FLOAT32 = (Launch(8, 2),)


@dataclass(slots=True)
class BlockAttention:
    """The kernel as an `Attend`, with the launch that was found fastest for each size of tile."""

    launches: dict[tuple[torch.dtype, int], Launch] = field(default_factory=dict)

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        """Compute attention for a batch of steps, as `Attend` defines it."""
        rows, device = inputs.rows, inputs.keys.device
        table, sizes = rows.once("key tables", KeyTables).of(rows, device, inputs.window)
        return attend_to_table(inputs, table, sizes, self.launches)

    def tune(self, cases: Sequence[Case], measure: Measure) -> None:
        """Time all launches on cases of one sequence each, and keep the fastest for their tiles."""
        for case in cases:
            _, num_heads, num_rows, _ = case.inputs.query.shape
            dtype = case.inputs.query.dtype
            packed = _tile_rows(num_heads // case.inputs.keys.shape[0] * num_rows, case.inputs)
            times: dict[Launch, float] = {}
            for launch in LAUNCHES_FLOAT32 if dtype == torch.float32 else LAUNCHES:
                self.launches[dtype, packed] = launch
                try:
                    times[launch] = measure(partial(case.run, self))
                except Exception as cause:  # for instance, too much shared memory
                    logger.info("tiles of %d rows, %s: cannot run (%s)", packed, launch, cause)
            del self.launches[dtype, packed]
            if times:
                self.launches[dtype, packed] = min(times, key=lambda one: times[one])
                found = "; ".join(f"{one} {ms:.3f} ms" for one, ms in times.items())
                logger.info("tiles of %d rows: %s", packed, found)


def attend_to_table(
    inputs: AttentionInputs,
    table: torch.Tensor,
    sizes: Sizes,
    launches: Mapping[tuple[torch.dtype, int], Launch],
) -> torch.Tensor:
    """Compute attention of each sequence's rows, its last positions, to its keys up to their own.

    Args:
        inputs: `query` is contiguous in its head_dim, `keys` and `values` in all dimensions.
        table: from `work_table`, on the device; rows of no sequence get zeros.
        launches: launches by dtype and size of tile, where others than the first were found faster.
    """
    query, keys, values = inputs.query, inputs.keys, inputs.values
    _, num_heads, num_rows, head_dim = query.shape
    assert query.stride(3) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    group = num_heads // keys.shape[0]
    parts = query.new_empty((sizes.num_parts, num_heads, head_dim), dtype=torch.float32)
    lses = query.new_empty((sizes.num_parts, num_heads), dtype=torch.float32)
    output = query.new_empty((1, num_rows, num_heads, head_dim))
    most_rows = max(segment.stop - segment.start for segment in inputs.rows.segments)
    with torch.cuda.device_of(query):
        for first_item, num_items, rows in (
            (0, sizes.own_items, most_rows),
            (sizes.own_items, sizes.shared_items, num_rows),
        ):
            if not num_items:
                continue
            packed = _tile_rows(group * rows, inputs)
            launch = launches.get((query.dtype, packed), first_launch(query.dtype))
            tiles = -(-rows // (packed // group))
            _attend_to_items[(tiles, num_items, keys.shape[0])](
                query,
                keys,
                values,
                table,
                parts,
                lses,
                inputs.scale * LOG2_E.value,
                query.stride(1),
                query.stride(2),
                keys.stride(0),
                inputs.window or 0,
                first_item,
                sizes.rows_at,
                sizes.blocks_at,
                **constants_of(
                    query.dtype,
                    num_heads,
                    group,
                    head_dim,
                    packed,
                    sizes.block_keys,
                    is_windowed=inputs.window is not None,
                ),
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
            )
        _merge_parts[(num_rows, num_heads)](
            parts,
            lses,
            table,
            output,
            inputs.sinks,
            sizes.rows_at,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            DIM=triton.next_power_of_2(head_dim),
            ITEM=ITEM,
            ROW=ROW,
            MERGED=MERGED,
            num_warps=4,
        )
    return output


def constants_of(
    dtype: torch.dtype,
    num_heads: int,
    group: int,
    head_dim: int,
    packed: int,
    block_keys: int,
    *,
    is_windowed: bool,
) -> dict[str, object]:
    """Return the numbers that the kernel is compiled for."""
    return {
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM": triton.next_power_of_2(head_dim),
        "PACKED": packed,
        "BLOCK_KEYS": block_keys,
        "ITEM": ITEM,
        "ROW": ROW,
        "BLOCK": BLOCK,
        "IS_WINDOWED": is_windowed,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }


def first_launch(dtype: torch.dtype) -> Launch:
    """Return the launch that is taken where none was timed."""
    return (LAUNCHES_FLOAT32 if dtype == torch.float32 else LAUNCHES)[0]


def _tile_rows(num_rows: int, inputs: AttentionInputs) -> int:
    """Return the rows of the tiles for so many rows and heads of a group together."""
    query = inputs.query
    most = tiling_on(inputs.keys.device, query.shape[3], query.dtype).most_rows
    return int(np.clip(triton.next_power_of_2(num_rows), TILES[0], most))


# Numbers that change from step to step must not make Triton compile the kernels anew.
@triton.jit(do_not_specialize=["window", "first_item", "rows_at", "blocks_at"])
def _attend_to_items(
    query,
    keys,
    values,
    table,
    parts,
    lses,
    scale,  # times log2(e), for powers of 2
    query_head_stride,
    query_row_stride,
    kv_head_stride,
    window,
    first_item,
    rows_at,
    blocks_at,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ITEM: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute attention for one KV head of one item, a tile of its rows at a time."""
    ROWS: tl.constexpr = PACKED // GROUP
    item = table + (first_item + tl.program_id(1)) * ITEM
    first_listed, num_rows = tl.load(item), tl.load(item + 1)
    first_block, num_blocks = tl.load(item + 2), tl.load(item + 3)
    first_part = tl.load(item + 4)
    blocks = table + blocks_at + first_block * BLOCK
    kv_head = tl.program_id(2)
    keys += kv_head.to(tl.int64) * kv_head_stride
    values += kv_head.to(tl.int64) * kv_head_stride
    packed = tl.arange(0, PACKED)  # row by row, the heads of the group side by side
    head = kv_head * GROUP + packed % GROUP
    place = tl.arange(0, BLOCK_KEYS)
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + packed // GROUP
        is_row = (row < num_rows) & (packed < ROWS * GROUP)
        listed = table + rows_at + (first_listed + row) * ROW
        position = tl.load(listed + 1, mask=is_row, other=0)
        tile = tl.load(
            query
            + tl.load(listed, mask=is_row, other=0)[:, None] * query_row_stride
            + head[:, None] * query_head_stride
            + dim[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        )
        best = tl.full([PACKED], float("-inf"), tl.float32)
        total = tl.zeros([PACKED], tl.float32)
        sums = tl.zeros([PACKED, DIM], tl.float32)
        slot, first, count = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
        for block in range(num_blocks):
            slots = slot.to(tl.int64) + place
            is_key = place < count
            key_position = first + place
            tile_keys = tl.load(
                keys + slots[None, :] * HEAD_DIM + dim[:, None],
                mask=is_key[None, :] & is_dim[:, None],
                other=0.0,
            ).to(tile.dtype)
            tile_values = tl.load(
                values + slots[:, None] * HEAD_DIM + dim[None, :],
                mask=is_key[:, None] & is_dim[None, :],
                other=0.0,
            ).to(tile.dtype)
            following = blocks + tl.minimum(block + 1, num_blocks - 1) * BLOCK
            slot, first, count = tl.load(following), tl.load(following + 1), tl.load(following + 2)
            scores = tl.dot(tile, tile_keys, input_precision=PRECISION) * scale
            is_seen = is_key[None, :] & (key_position[None, :] <= position[:, None])
            if IS_WINDOWED:
                is_seen &= key_position[None, :] > position[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            shift = tl.where(better == float("-inf"), 0.0, better)  # 0 if no key was seen so far
            weights = tl.exp2(scores - shift[:, None])
            keep = tl.exp2(best - shift)
            total = total * keep + tl.sum(weights, 1)
            sums = tl.dot(
                weights.to(tile_values.dtype),
                tile_values,
                sums * keep[:, None],
                input_precision=PRECISION,
            )
            best = better
        is_empty = total == 0.0
        divisor = tl.where(is_empty, 1.0, total)
        part = (first_part + row).to(tl.int64) * NUM_HEADS + head
        tl.store(
            parts + part[:, None] * HEAD_DIM + dim[None, :],
            sums / divisor[:, None],
            mask=is_row[:, None] & is_dim[None, :],
        )
        lse = tl.where(is_empty, float("-inf"), best + tl.log2(divisor))
        tl.store(lses + part, lse, mask=is_row)


@triton.jit(do_not_specialize=["rows_at"])
def _merge_parts(
    parts,
    lses,
    table,
    output,
    sinks,
    rows_at,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ITEM: tl.constexpr,
    ROW: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merge the parts of one head of one row: those of its own keys and those of its prefix."""
    listed, head = tl.program_id(0), tl.program_id(1)
    line = table + rows_at + listed * ROW
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    sums = tl.zeros([DIM], tl.float32)
    if sinks is not None:  # as a part of one key without a value
        best = tl.load(sinks + head) * LOG2_E
        total = tl.full([], 1.0, tl.float32)
    for column in tl.static_range(2, ROW, 2):
        first_item, num_items = tl.load(line + column), tl.load(line + column + 1)
        for start in range(0, num_items, MERGED):
            place = start + tl.arange(0, MERGED)
            is_part = place < num_items
            item = table + (first_item + place) * ITEM
            first_part = tl.load(item + 4, mask=is_part, other=0)
            row = listed - tl.load(item, mask=is_part, other=0)
            part = (first_part + row).to(tl.int64) * NUM_HEADS + head
            lse = tl.load(lses + part, mask=is_part, other=float("-inf"))
            better = tl.maximum(best, tl.max(lse, 0))
            shift = tl.where(better == float("-inf"), 0.0, better)
            weights = tl.exp2(lse - shift)
            keep = tl.exp2(best - shift)
            tile = tl.load(
                parts + part[:, None] * HEAD_DIM + dim[None, :],
                mask=is_part[:, None] & is_dim[None, :],
                other=0.0,
            )
            total = total * keep + tl.sum(weights, 0)
            sums = sums * keep + tl.sum(tile * weights[:, None], 0)
            best = better
    merged = sums / tl.where(total == 0.0, 1.0, total)
    target = output + (tl.load(line) * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(target, merged.to(output.dtype.element_ty), mask=is_dim)
