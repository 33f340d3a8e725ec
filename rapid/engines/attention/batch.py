"""Assembly of one ragged forward: the rows of many sequences, side by side in a batch of 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rapid.engines.attention.rows import Kernels, RaggedRows
from rapid.engines.attention.segments import Segment
from rapid.engines.kv.cache import KVCache, PageTable


@dataclass(frozen=True, slots=True)
class Feed:
    """The next rows of one sequence.

    Attributes:
        token_ids: input token of each row.
        position: position of the first row, counted from the start of the prompt.
        table: pages that hold the sequence's keys and values.
        num_wanted: number of last rows that need logits; 0 for a prefill chunk.
        unseen: earlier positions [a, b) that the rows do not attend to.
    """

    token_ids: Sequence[int]
    position: int
    table: PageTable
    num_wanted: int
    unseen: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward.

    Attributes:
        input_ids: token ids, [1, rows].
        position_ids: positions, [1, rows].
        wanted: indices of the rows whose logits are computed, [num_wanted].
        rows: the same rows with the cache slots that attention reads and writes.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    wanted: torch.Tensor
    rows: RaggedRows


@dataclass(frozen=True, slots=True)
class RowLists:
    """The rows of one forward on the host, before they are tensors.

    Attributes:
        input_ids: token id of each row.
        positions: position of each row.
        slots: slot of the cache that each row's key and value go to.
        wanted: indices of the rows whose logits are computed.
        segments: one per sequence, together covering all rows.
    """

    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    wanted: list[int]
    segments: list[Segment]

    def packed(self) -> torch.Tensor:
        """Return ids, positions, slots and wanted rows side by side, to be copied at once."""
        return torch.tensor(self.input_ids + self.positions + self.slots + self.wanted)

    def batch(self, packed: torch.Tensor, cache: KVCache, kernels: Kernels | None) -> Batch:
        """Return the batch whose tensors are views of `packed`, on the device of the inputs."""
        num_rows = len(self.input_ids)
        ids, positions, slots = packed[: 3 * num_rows].view(3, num_rows)
        wanted = packed[3 * num_rows :]
        return Batch(
            ids[None], positions[None], wanted, RaggedRows(cache, self.segments, slots, kernels)
        )


def assemble(
    feeds: Sequence[Feed],
    cache: KVCache,
    device: torch.device,
    kernels: Kernels | None = None,
) -> Batch:
    """Concatenate the rows of all feeds into one batch."""
    rows = rows_of(feeds)
    return rows.batch(rows.packed().to(device), cache, kernels)


def rows_of(feeds: Sequence[Feed]) -> RowLists:
    """Concatenate the rows of all feeds."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    segments: list[Segment] = []
    for feed in feeds:
        first, position = len(input_ids), feed.position
        stop = position + len(feed.token_ids)
        input_ids += feed.token_ids
        positions += range(position, stop)
        for span in feed.table.spans(position, stop):
            slots += range(*span)
        end = len(input_ids)
        wanted += range(end - feed.num_wanted, end)
        before, after = feed.unseen
        sinks = feed.table.spans(0, before)
        segments.append(
            Segment(
                first,
                end,
                sinks + feed.table.spans(after, position),
                sinks + feed.table.spans(after, stop),
            )
        )
    return RowLists(input_ids, positions, slots, wanted, segments)
