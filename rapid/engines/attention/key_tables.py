"""The work tables of a batch on the device: one for each window of the model's layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from rapid.engines.attention.kernel_inputs import RaggedRows
from rapid.engines.attention.segments import Segment
from rapid.engines.attention.work_items import BLOCK, BLOCK_KEYS, Sizes, work_table

Key = tuple[torch.device, int | None]  # device and window of a layer


class KeyTables:
    """The work tables of a batch, made when a layer first asks for them.

    With `max_context`, the tokens of the longest sequence, they can be refilled for other batches
    of the same number of rows and sequences, as a captured graph needs it.
    """

    def __init__(self, max_context: int | None = None) -> None:
        self._max_context = max_context
        self._tables: dict[Key, tuple[torch.Tensor, Sizes]] = {}

    def of(
        self, rows: RaggedRows, device: torch.device, window: int | None
    ) -> tuple[torch.Tensor, Sizes]:
        """Return the table of a layer, int32 on its device, and the table's sizes."""
        key = device, window
        if key not in self._tables:
            sizes = self._sizes(rows, key)
            made = torch.from_numpy(work_table(rows.segments, sizes, window))
            num_ints = max(len(made), sizes.blocks_at + self._room(len(rows.segments)))
            table = torch.zeros(num_ints, dtype=torch.int32, device=device)
            table[: len(made)].copy_(made)
            self._tables[key] = table, sizes
        return self._tables[key]

    def refill(self, segments: Sequence[Segment]) -> bool:
        """Overwrite all tables with those of another batch; return False if one does not fit."""
        refilled = [
            (table, torch.from_numpy(work_table(segments, sizes, window)))
            for (_, window), (table, sizes) in self._tables.items()
        ]
        if any(len(made) > len(table) for table, made in refilled):
            return False
        for table, made in refilled:
            table[: len(made)].copy_(made)
        return True

    def _room(self, num_sequences: int) -> int:
        """Return the numbers to provide for blocks, of which a run may end in a short one."""
        if self._max_context is None:
            return 0
        return BLOCK * num_sequences * (self._max_context // BLOCK_KEYS * 5 // 4 + 64)

    def _sizes(self, rows: RaggedRows, key: Key) -> Sizes:
        device, window = key
        num_kv_heads = rows.cache.layers[0][0].shape[0]
        sizes = Sizes.of(len(rows.slots), len(rows.segments), num_kv_heads, processors_of(device))
        is_fixed = self._max_context is not None
        if window is not None or not (is_fixed or rows.prefixes()):
            return replace(sizes, shared_items=0)
        return sizes


@functools.cache
def processors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; 8 elsewhere, for the interpreter."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 8
