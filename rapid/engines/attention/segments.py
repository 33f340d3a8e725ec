"""Segments of a ragged batch, and the type of attention over a part of the keys."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

MAX_STEP_ROWS = 16  # the kernels take a sequence with more rows as a prefill chunk


Spans = list[tuple[int, int]]  # of slots [start, stop), in a sequence's order
Partial = tuple[torch.Tensor, torch.Tensor]  # output [b, h, rows, d] and log-sum-exp [b, h, rows]


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

    @property
    def is_step(self) -> bool:
        """Whether this is a decode, draft or verify step, not a prefill chunk."""
        return self.stop - self.start <= MAX_STEP_ROWS


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
