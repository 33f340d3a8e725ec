"""Segments of a ragged batch, and the type of attention over a part of the keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from rapid.engines.kv.cache import BlockArray, PageTable, blocks_of

MAX_STEP_ROWS = 16  # the kernels take a sequence with more rows as a prefill chunk


Spans = list[tuple[int, int]]  # of slots [start, stop), in a sequence's order
Partial = tuple[torch.Tensor, torch.Tensor]  # output [b, h, rows, d] and log-sum-exp [b, h, rows]


class Paged(NamedTuple):
    """Keys at the first positions of a page table, and those of padding in one span behind them."""

    table: PageTable
    num_keys: int
    num_padding: int = 0


@dataclass(slots=True)
class Segment:
    """The rows of one sequence in a ragged batch."""

    start: int  # first row in the batch
    stop: int  # row after the last
    # Slots [start, stop) of the earlier positions that the rows attend to, in order.
    past: list[tuple[int, int]]
    all_spans: list[tuple[int, int]]  # the same with the slots of the rows themselves
    # Slots before `past` that only the first rows attend to, in a layer with a sliding window
    # (`rapid.engines.attention.windows`).
    edge: list[tuple[int, int]] = field(default_factory=list)
    paged: Paged | None = None  # what `all_spans` are, where they are a sequence's first positions

    @property
    def is_step(self) -> bool:
        """Whether this is a decode, draft or verify step, not a prefill chunk."""
        return self.stop - self.start <= MAX_STEP_ROWS

    @property
    def num_keys(self) -> int:
        """Number of keys of `all_spans`."""
        if self.paged is None:
            return num_keys(self.all_spans)
        return self.paged.num_keys + self.paged.num_padding

    def blocks(self, first: int, stop: int, size: int) -> BlockArray:
        """Return the `blocks_of` its keys [first, stop), counted from 0."""
        if self.paged is None:
            return blocks_of(between(self.all_spans, first, stop), first, size)
        table, num_own, _ = self.paged
        if stop <= num_own:
            return table.blocks(first, stop, size)
        more = between(self.all_spans[-1:], max(first - num_own, 0), stop - num_own)
        padding = blocks_of(more, max(first, num_own), size)
        return np.concatenate([table.blocks(first, num_own, size), padding])


def num_keys(spans: Spans) -> int:
    """Return the number of slots of spans."""
    return sum(stop - start for start, stop in spans)


def between(spans: Spans, first: int, stop: int | None = None) -> Spans:
    """Return the slots of the keys [first, stop) of `spans`, counted from 0; None is the end."""
    found, position = [], 0
    for a, b in spans:
        start = max(a, a + first - position)
        end = b if stop is None else min(b, a + stop - position)
        if start < end:
            found.append((start, end))
        position += b - a
    return found
