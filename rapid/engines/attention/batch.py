"""Assembly of one ragged forward: the rows of many sequences, side by side in a batch of 1."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rapid.engines.attention.kernel_inputs import Kernels, RaggedRows
from rapid.engines.attention.segments import Paged, Segment
from rapid.engines.kv.cache import KVCache, PageTable
from rapid.engines.kv.rings import Ring


@dataclass(frozen=True, slots=True)
class Feed:
    """The next rows of one sequence."""

    token_ids: Sequence[int]  # input token of each row
    position: int  # position of the first row, counted from the start of the prompt
    table: PageTable  # pages that hold the sequence's keys and values
    num_wanted: int  # number of last rows that need logits; 0 for a prefill chunk
    unseen: tuple[int, int] = (0, 0)  # earlier positions [a, b) that the rows do not attend to
    # Slots of the sequence in layers that have rings; None where all have pages.
    ring: Ring | None = None
    # Slot for the rows' keys and values, where their pages hold them already and only those of the
    # ring are missing.
    scratch: int | None = None
    # The token of the only row, int64 [1] on the device, in place of `token_ids`, which stand in
    # for it. Of the feeds of a forward either all have one or none does.
    drawn: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one forward."""

    input_ids: torch.Tensor  # token ids, [1, rows]
    position_ids: torch.Tensor  # positions, [1, rows]
    wanted: torch.Tensor  # indices of the rows whose logits are computed, [num_wanted]
    rows: RaggedRows  # the same rows with the cache slots that attention reads and writes


@dataclass(frozen=True, slots=True)
class RowLists:
    """The rows of one forward on the host, before they are tensors."""

    input_ids: list[int]  # token id of each row
    positions: list[int]  # position of each row
    slots: list[int]  # slot of the cache that each row's key and value go to
    wanted: list[int]  # indices of the rows whose logits are computed
    segments: list[Segment]  # one per sequence, together covering all rows
    # As `slots`, in layers that have rings; empty where all have pages.
    ring_slots: list[int] = field(default_factory=list)
    # As `segments`, in layers that have rings.
    ring_segments: list[Segment] = field(default_factory=list)
    drawn: list[torch.Tensor] = field(default_factory=list)  # the rows' tokens, on the device

    def list_all(self) -> list[int]:
        """Return ids, positions, slots and wanted rows side by side, to be copied at once."""
        slots = self.slots + self.ring_slots
        return self.input_ids + self.positions + slots + self.wanted

    def pack(self) -> torch.Tensor:
        """Return `list_all` as a tensor."""
        return torch.tensor(self.list_all())

    def batch(self, packed: torch.Tensor, cache: KVCache, kernels: Kernels | None) -> Batch:
        """Return the batch whose tensors are views of `pack`, on the device of the inputs."""
        num_rows = len(self.input_ids)
        ids, positions, slots, *more = torch.split(
            packed, [num_rows] * 3 + [num_rows] * bool(self.ring_slots) + [len(self.wanted)]
        )
        if self.drawn:
            ids = torch.cat(self.drawn)
        rows = RaggedRows(cache, self.segments, slots, kernels)
        if self.ring_slots:
            rows.rings = RaggedRows(cache, self.ring_segments, more[0], kernels)
        return Batch(ids[None], positions[None], more[-1], rows)


def assemble(
    feeds: Sequence[Feed],
    cache: KVCache,
    device: torch.device,
    kernels: Kernels | None = None,
) -> Batch:
    """Concatenate the rows of all feeds into one batch."""
    rows = rows_of(feeds)
    return rows.batch(rows.pack().to(device), cache, kernels)


def rows_of(feeds: Sequence[Feed]) -> RowLists:
    """Concatenate the rows of all feeds."""
    made = RowLists([], [], [], [], [])
    for feed in feeds:
        first, position = len(made.input_ids), feed.position
        stop = position + len(feed.token_ids)
        made.input_ids.extend(feed.token_ids)
        if feed.drawn is not None:
            made.drawn.append(feed.drawn)
        made.positions.extend(range(position, stop))
        made.slots.extend(slots_of(feed.table, position, stop, feed.scratch))
        end = len(made.input_ids)
        made.wanted.extend(range(end - feed.num_wanted, end))
        before, after = feed.unseen
        sinks = feed.table.spans(0, before)
        past, own = feed.table.spans(after, position), feed.table.spans(after, stop)
        paged = None if after else Paged(feed.table, min(stop, feed.table.num_tokens))
        made.segments.append(Segment(first, end, sinks + past, sinks + own, paged=paged))
        if (ring := feed.ring) is not None:
            made.ring_slots.extend(slots_of(ring, position, stop))
            start = ring.plan.first_seen(position)
            sinks, after = ring.spans(start, before), max(start, after)
            past, own = ring.spans(after, position), ring.spans(after, stop)
            made.ring_segments.append(Segment(first, end, sinks + past, sinks + own))
    return made


def slots_of(
    table: PageTable | Ring, start: int, stop: int, scratch: int | None = None
) -> Iterable[int]:
    """Return the slot that each row at positions [start, stop) is written to."""
    if scratch is not None:
        return [scratch] * (stop - start)
    return itertools.chain.from_iterable(range(*span) for span in table.spans(start, stop))
