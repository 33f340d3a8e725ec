"""The work tables of a batch on the device: one for each window of the model's layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rapid.engines.attention.kernel_inputs import RaggedRows
from rapid.engines.attention.segments import Segment
from rapid.engines.attention.work_items import BLOCK, ITEM, Sizes, Tiling, tiling_of, work_table

Key = tuple[torch.device, int | None]  # device and window of a layer

_INTERPRETED_BYTES = 227 * 2**10  # shared memory where the interpreter runs: that of an H100
_ALIGNED = 4  # numbers, 16 bytes: Triton compiles the kernels anew for tables that are not
_ROOM = 5 / 4  # blocks to provide for each that whole ones take, as a run may end in a short one
_MORE_ROOM = 64  # blocks of a sequence on top of that


class KeyTables:
    """The work tables of a batch, made when a layer first asks for them."""

    def __init__(self, *, is_example: bool = False) -> None:
        """Start without any table; those of an example have a section for shared prefixes."""
        self._is_example = is_example
        self.tables: dict[Key, tuple[torch.Tensor, Sizes]] = {}

    def of(
        self, rows: RaggedRows, device: torch.device, window: int | None
    ) -> tuple[torch.Tensor, Sizes]:
        """Return the table of a layer, int32 on its device, and the table's sizes."""
        key = device, window
        if key not in self.tables:
            sizes = self._sizes(rows, key)
            table = torch.from_numpy(work_table(rows.segments, sizes, window))
            self.tables[key] = table.to(device), sizes
        return self.tables[key]

    def _sizes(self, rows: RaggedRows, key: Key) -> Sizes:
        device, window = key
        layout = rows.cache.layout
        tiling = tiling_on(device, layout.head_dim, layout.dtype)
        sizes = Sizes.of(
            len(rows.slots),
            len(rows.segments),
            rows.cache.layers[0][0].shape[0],
            processors_of(device),
            tiling.block_keys,
        )
        if window is not None or not (self._is_example or rows.prefixes()):
            return replace(sizes, shared_items=0)
        return sizes


@dataclass(frozen=True, slots=True)
class _Section:
    """A work table in a `TableSpace` without its blocks, which follow all sections."""

    part: int  # index of its `KeyTables` among those of a batch
    key: Key
    sizes: Sizes
    start: int  # its place


class TableSpace:
    """Places of other batches' work tables in one tensor, which a captured graph reads.

    First come the sections that have one size, then the blocks of all tables, as many as there are.
    """

    def __init__(
        self, examples: Sequence[KeyTables], num_sequences: int, start: int, max_context: int
    ) -> None:
        """Lay out the tables of an example's batch, after each layer has asked for them.

        Args:
            examples: tables over the slots of pages, then over those of rings if there are any.
            start: number of the tensor's numbers that others have.
            max_context: tokens of the longest sequence.
        """
        self._num_parts = len(examples)
        self._sections: list[_Section] = []
        for part, tables in enumerate(examples):
            for key, (_, sizes) in tables.tables.items():
                # Blocks are counted from the end of their section, and those of all are side by
                # side.
                while start % _ALIGNED or (start + sizes.blocks_at) % BLOCK:
                    start += 1
                self._sections.append(_Section(part, key, sizes, start))
                start += sizes.blocks_at
        self._blocks_at = self.num_ints = -(-start // BLOCK) * BLOCK
        for one in self._sections:
            num_blocks = max_context // one.sizes.block_keys * _ROOM + _MORE_ROOM
            self.num_ints += int(BLOCK * num_sequences * num_blocks)

    def tables(self, space: torch.Tensor) -> list[KeyTables]:
        """Return the tables of each part of the batch as views of a tensor, for its layers."""
        made = [KeyTables() for _ in range(self._num_parts)]
        for one in self._sections:
            made[one.part].tables[one.key] = space[one.start :], one.sizes
        return made

    def fill(self, memory: np.ndarray, segments: Sequence[Sequence[Segment]]) -> int | None:
        """Write the tables of another batch; return how many numbers of `memory` are of use then.

        Args:
            memory: int32 [num_ints] on the host.
            segments: those of each part of the batch.

        Returns:
            None where a table does not fit.
        """
        stop = self._blocks_at
        for one in self._sections:
            sizes, start = one.sizes, one.start
            made = work_table(segments[one.part], sizes, one.key[1])
            blocks = made[sizes.blocks_at :]
            if stop + len(blocks) > len(memory):
                return None
            items = made[: sizes.rows_at].reshape(-1, ITEM)
            items[:, 2] += (stop - start - sizes.blocks_at) // BLOCK
            memory[start : start + sizes.blocks_at] = made[: sizes.blocks_at]
            memory[stop : stop + len(blocks)] = blocks
            stop += len(blocks)
        return stop


@functools.cache
def processors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; 8 elsewhere, for the interpreter."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 8


@functools.cache
def tiling_on(device: torch.device, head_dim: int, dtype: torch.dtype) -> Tiling:
    """Return the sizes that the kernel has on a device, for queries of a dtype."""
    shared_bytes = _INTERPRETED_BYTES
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)  # torch's types lack the number
        shared_bytes = found.shared_memory_per_block_optin
    return tiling_of(head_dim, dtype.itemsize, shared_bytes)
