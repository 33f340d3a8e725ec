"""The work table of the Triton kernel: which rows read which keys, in shares of equal size.

Every key is read once for all rows that attend to it (a *reading*); its blocks of keys are divided
into *items*, one for each program. The table's sections keep their places for a number of rows and
sequences, so that a captured graph can read new ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rapid.engines.attention.segments import Segment, num_keys
from rapid.engines.attention.shared_prefixes import find_shared_prefixes

BLOCK_KEYS = 64  # of the largest blocks
TILES = (16, 32, 64, 128)  # rows of a tile of queries, counted for every head of a KV group
_FIT = 0.9  # share of a program's shared memory that its tile, keys and values may take
_LEAST_TILE = 32  # rows for which a block may not become smaller
ITEM = 5  # columns of an item: first listed row, rows, first block, blocks, first part
ROW = 6  # columns of a listed row: its row, its position, first item and items: own, of the prefix
BLOCK = 3  # columns of a block: first slot, position of its first key, keys
PROGRAMS_PER_PROCESSOR = 4
SHARED_PROGRAMS_PER_PROCESSOR = 2  # of prefixes, whose programs have more rows
MAX_PARTS = 2048  # parts left to be merged: 34 MB with 32 heads of 128


class Tiling(NamedTuple):
    """Sizes that the kernel is compiled for, by the width of heads and the device."""

    block_keys: int  # most keys of a block
    most_rows: int  # rows of the largest tile


def tiling_of(head_dim: int, itemsize: int, shared_bytes: int) -> Tiling:
    """Return the largest blocks and tiles that fit a device, and spill few registers or none.

    `benchmarks/engine/kernel_resources.py` shows what they take.

    Args:
        head_dim: numbers of a head.
        itemsize: bytes of a number of the queries.
        shared_bytes: shared memory that a program may have.
    """
    row = (1 << (head_dim - 1).bit_length()) * itemsize
    most, largest = min(TILES[-1], 2**15 // row), BLOCK_KEYS
    if itemsize == torch.float32.itemsize:  # products of which take more registers
        most, largest = max(TILES[0], min(_LEAST_TILE, 2**14 // row)), BLOCK_KEYS // 2
    for block_keys in (largest, largest // 2, largest // 4):
        # A tile and its weights, beside two buffers of keys and of values.
        left = _FIT * shared_bytes - 4 * block_keys * row
        fitting = [one for one in TILES if one * (row + block_keys * itemsize) <= left] or [0]
        if fitting[-1] >= min(most, _LEAST_TILE):
            break
    return Tiling(block_keys, max(TILES[0], min(most, fitting[-1])))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the sections of a work table."""

    num_rows: int
    own_items: int  # items for the keys of single sequences, at least one for each
    shared_items: int  # items for the keys of shared prefixes; 0 if there is only one sequence
    block_keys: int = BLOCK_KEYS  # most keys of a block

    @classmethod
    def of(
        cls,
        num_rows: int,
        num_sequences: int,
        num_kv_heads: int,
        processors: int,
        block_keys: int = BLOCK_KEYS,
    ) -> Sizes:
        """Return the sizes that fill a device, whose programs take one item and KV head each."""
        own = -(-PROGRAMS_PER_PROCESSOR * processors // num_kv_heads)
        shared = -(-SHARED_PROGRAMS_PER_PROCESSOR * processors // num_kv_heads)
        most = num_sequences // 2
        shared = max(shared, most) if most else 0
        return cls(num_rows, max(own, num_sequences), shared, block_keys)

    @property
    def rows_at(self) -> int:
        """Place of the listed rows."""
        return (self.own_items + self.shared_items) * ITEM

    @property
    def blocks_at(self) -> int:
        """Place of the blocks."""
        return self.rows_at + self.num_rows * ROW

    def max_parts(self, num_items: int) -> int:
        """Return the number of rows that so many items may compute together."""
        return min(num_items * self.num_rows, max(self.num_rows, MAX_PARTS))

    @property
    def num_parts(self) -> int:
        """Number of rows that all items may compute together."""
        return self.max_parts(self.own_items) + self.max_parts(self.shared_items)


class _SharedReading(NamedTuple):
    """Neighbouring listed rows [first, stop) that read the same keys."""

    first: int  # first listed row
    stop: int  # listed row after the last
    blocks: np.ndarray  # blocks of keys, [blocks, BLOCK]

    @property
    def num_rows(self) -> int:
        return self.stop - self.first


def work_table(segments: Sequence[Segment], sizes: Sizes, window: int | None = None) -> np.ndarray:
    """Return the work table of a batch: items of sequences and of prefixes, listed rows, blocks.

    With a `window` of last keys, blocks outside those of all rows are left out, and prefixes are
    not shared. Rows of no sequence get zeros.
    """
    rows, own, shared = _readings(segments, sizes, window)
    blocks = [reading.blocks for reading in own + shared]
    table = np.zeros(sizes.blocks_at + sum(one.size for one in blocks), dtype=np.int32)
    items = table[: sizes.rows_at].reshape(-1, ITEM)
    first_block = 0
    for column, readings, start, stop, first_part in (
        (2, own, 0, sizes.own_items, 0),
        (4, shared, sizes.own_items, len(items), sizes.max_parts(sizes.own_items)),
    ):
        share = _share(readings, stop - start, sizes.max_parts(stop - start))
        first_item, part = start, first_part
        for reading in readings:
            skipped = np.arange(0, len(reading.blocks), share)
            mine = items[first_item : first_item + len(skipped)]
            mine[:, 0] = reading.first
            mine[:, 1] = reading.num_rows
            mine[:, 2] = skipped + first_block
            mine[:, 3] = np.minimum(len(reading.blocks) - skipped, share)
            mine[:, 4] = np.arange(len(mine)) * reading.num_rows + part
            rows[reading.first : reading.stop, column : column + 2] = first_item, len(mine)
            first_item, part = first_item + len(mine), part + len(mine) * reading.num_rows
            first_block += len(reading.blocks)
    table[sizes.rows_at : sizes.blocks_at] = rows.ravel()
    if blocks:
        table[sizes.blocks_at :] = np.concatenate(blocks).ravel()
    return table


def _readings(
    segments: Sequence[Segment], sizes: Sizes, window: int | None
) -> tuple[np.ndarray, list[_SharedReading], list[_SharedReading]]:
    """Return the listed rows with their positions, and the readings of sequences and prefixes."""
    is_shared = sizes.shared_items > 0 and window is None
    prefixes = find_shared_prefixes(segments) if is_shared else []
    hidden = {index: num_keys(one.spans) for one in prefixes for index in one.rests}
    order = [*hidden, *(index for index in range(len(segments)) if index not in hidden)]
    rows = np.zeros((sizes.num_rows, ROW), dtype=np.int32)
    own: list[_SharedReading] = []
    listed = 0
    for index in order:
        segment = segments[index]
        total, num_rows = segment.num_keys, segment.stop - segment.start
        lines = slice(listed, listed + num_rows)
        rows[lines, 0] = np.arange(segment.start, segment.stop)
        rows[lines, 1] = np.arange(total - num_rows, total)
        skipped = hidden.get(index, 0)
        if window is not None:
            skipped = max(0, total - num_rows + 1 - window)
        blocks = segment.blocks(skipped, total, sizes.block_keys)
        own.append(_SharedReading(listed, listed + num_rows, blocks))
        listed += num_rows
    if listed < sizes.num_rows:
        rows[listed:, 0] = np.setdiff1d(np.arange(sizes.num_rows), rows[:listed, 0])
    shared, first = [], 0
    for prefix in prefixes:
        stop = first + sum(rest.stop - rest.start for rest in prefix.rests.values())
        member = segments[next(iter(prefix.rests))]
        blocks = member.blocks(0, num_keys(prefix.spans), sizes.block_keys)
        shared.append(_SharedReading(first, stop, blocks))
        first = stop
    return rows, own, shared


def _share(readings: Sequence[_SharedReading], max_items: int, max_parts: int) -> int:
    """Return the least number of blocks of an item with which there are not too many items."""
    lengths = [(len(reading.blocks), reading.num_rows) for reading in readings]

    def fits(share: int) -> bool:
        num_items = num_parts = 0
        for length, num_rows in lengths:
            own = -(-length // share)
            num_items, num_parts = num_items + own, num_parts + own * num_rows
        return num_items <= max_items and num_parts <= max_parts

    longest = max((length for length, _ in lengths), default=1)
    return 1 + bisect_left(range(1, longest + 1), True, key=fits)
