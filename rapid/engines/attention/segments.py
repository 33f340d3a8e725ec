"""The parts of a sequence's keys, and attention over a part of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_STEP_ROWS = 16  # a sequence with more rows is a prefill chunk to the kernels


Partial = tuple[torch.Tensor, torch.Tensor]  # output [b, h, rows, d] and log-sum-exp [b, h, rows]


@dataclass(slots=True)
class Segment:
    """Rows [start, stop) of the batch belong to one sequence and attend to its `past` slots.

    `all_spans` also covers the new rows themselves.
    """

    start: int
    stop: int
    past: list[tuple[int, int]]
    all_spans: list[tuple[int, int]]

    @property
    def is_step(self) -> bool:
        """A decode, draft or verify, not a prefill chunk."""
        return self.stop - self.start <= MAX_STEP_ROWS
