"""What an engine measures of its own time, and what it concludes from it.

No figure here is about hardware: everything is learnt from the steps and the calls themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from rapid.engines.attention.batch import Feed
from rapid.estimators import RunningMedian

_STEPS_BETWEEN_PROBES = 48
_PROBE_STEPS = 6
_COLD_STEPS = 3
_DECAY = 0.9
_SWEEPS = 4


class StepCosts:
    """What steps take without prefill rows, and what those add at their depth.

    ::

        seconds = base + rows * (a + b * depth)    beside other rows
        seconds = start + rows * (a + b * depth)   alone

    `base_s` is a running median of the steps without prefill, but the first three after one with:
    those find the caches full of the prompt and take up to half as long again. start, a and b are
    fitted to the others' seconds per row by least squares with none below zero, the latest steps
    counting most.
    """

    def __init__(self) -> None:
        self.base_s = RunningMedian()
        self._num_chunks = 0  # steps with prefill since the base was last measured
        self._num_others = 0  # steps without it in a row; a chunk amid a probe does not end one
        self._fitted = [0.0] * 3  # start, a, b
        self._products = [[0.0] * 3 for _ in range(3)]  # of (1 / rows if alone, 1, depth)
        self._targets = [0.0] * 3  # of the same with seconds per row

    @property
    def is_base_due(self) -> bool:
        """Whether the base has not been measured yet, or not for 48 steps that had prefill."""
        return self.base_s.value is None or self._num_chunks >= _STEPS_BETWEEN_PROBES

    def forget_base(self) -> None:
        """It no longer holds: measured anew before anything else is."""
        self.base_s.clear()

    @property
    def start_s(self) -> float:
        """What a step of prefill rows alone takes before them; the base while none was seen."""
        return self._fitted[0] if self._products[0][0] else self.base_s.value or 0.0

    def row_s(self, depth: int) -> float:
        """Seconds that a prefill row at `depth` adds; 0 when unknown or too little to see."""
        return self._fitted[1] + self._fitted[2] * depth

    def observe(self, seconds: float, prefills: Iterable[Feed], *, is_alone: bool) -> None:
        """Learn from a step.

        Args:
            prefills: its prefill rows.
            is_alone: it had no other.
        """
        rows = keys = 0.0
        for feed in prefills:
            rows += len(feed.token_ids)
            keys += len(feed.token_ids) * (feed.position + len(feed.token_ids) / 2)
        if not rows:
            self._num_others += 1
            if self._num_others > _COLD_STEPS or not self._num_chunks:
                self.base_s.add(seconds)
            if self._num_others >= _PROBE_STEPS:
                self._num_chunks = 0
            return
        if not self.is_base_due:  # else who stays away for long would never let it be measured
            self._num_others = 0
        self._num_chunks += 1
        if is_alone:
            self._fit((1.0 / rows, 1.0, keys / rows), seconds / rows)
        elif self.base_s.value is not None:
            self._fit((0.0, 1.0, keys / rows), (seconds - self.base_s.value) / rows)

    def _fit(self, row: tuple[float, ...], seconds: float) -> None:
        """A few sweeps of Gauss-Seidel from the last fit; nothing becomes negative."""
        for i in range(3):
            self._targets[i] = _DECAY * self._targets[i] + row[i] * seconds
            for j in range(3):
                self._products[i][j] = _DECAY * self._products[i][j] + row[i] * row[j]
        for _ in range(_SWEEPS):
            for i, products in enumerate(self._products):
                if products[i]:
                    others = sum(products[j] * self._fitted[j] for j in range(3) if j != i)
                    self._fitted[i] = max((self._targets[i] - others) / products[i], 0.0)
