"""What an engine measures of its own time, and what it concludes from it.

No figure here is about hardware: everything is learnt from the steps and the calls themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rapid.engines.batching import Feed

_STEPS_BETWEEN_PROBES = 8


@dataclass
class RunningMean:
    """An exponential average: the first value counts whole, each later one by `weight`."""

    weight: float = 0.2
    value: float | None = None

    def add(self, value: float) -> None:
        """Take one more measurement in."""
        known = value if self.value is None else self.value
        self.value = known + self.weight * (value - known)


@dataclass
class Gap:
    """How long a drafter has between a block and the next call on the same choice."""

    seconds: RunningMean = field(default_factory=RunningMean)
    handed_out_at: float | None = None

    def hand_out(self, now: float) -> None:
        """A block leaves."""
        self.handed_out_at = now

    def call(self, now: float) -> None:
        """The next call on the choice arrived."""
        if self.handed_out_at is not None:
            self.seconds.add(now - self.handed_out_at)
        self.handed_out_at = None

    def num_steps(self, step_s: float | None, at_most: int) -> int:
        """Steps that fit into the gap; before anything is measured, `at_most`."""
        if self.seconds.value is None or not step_s:
            return at_most
        return min(int(self.seconds.value / step_s), at_most)


class StepCosts:
    """What steps cost without prefill rows, and what a prefill row adds to them at its depth.

    The addition is fitted as ``seconds = rows * (a + b * depth)`` by least squares over the steps
    that mixed both, the latest counting most: the layers' matrices and the attention.
    """

    def __init__(self) -> None:
        self.base_s = RunningMean()
        self._num_mixed = 0  # since the base was last measured
        self._sums = [0.0] * 5  # rows^2, rows * keys, keys^2, rows * seconds, keys * seconds

    def observe(self, seconds: float, prefills: Iterable[Feed], *, is_mixed: bool) -> None:
        """Learn from a step.

        Args:
            prefills: its prefill rows.
            is_mixed: it had other rows too; a step of prefill alone teaches nothing.
        """
        rows = keys = 0.0
        for feed in prefills:
            rows += len(feed.token_ids)
            keys += len(feed.token_ids) * (feed.position + len(feed.token_ids) / 2)
        if not rows:
            self.base_s.add(seconds)
            self._num_mixed = 0
        elif is_mixed and self.base_s.value is not None:
            self._num_mixed += 1
            added = max(seconds - self.base_s.value, 0.0)
            products = (rows * rows, rows * keys, keys * keys, rows * added, keys * added)
            self._sums = [0.9 * old + new for old, new in zip(self._sums, products, strict=True)]

    def num_rows(self, slowdown: float, depth: int, unknown: int) -> int:
        """Prefill rows beside which a step takes at most `slowdown` times what it else would.

        At least one; but none in every ninth such step, so that what steps cost without is known
        as it is now. Before anything is measured: `unknown`.
        """
        if self.base_s.value is None or self._num_mixed >= _STEPS_BETWEEN_PROBES:
            return 0
        row_s = self._row_s(depth)
        if not row_s:
            return unknown
        return max(1, int((slowdown - 1) * self.base_s.value / row_s))

    def _row_s(self, depth: int) -> float:
        """Seconds that a prefill row at `depth` adds; 0 when unknown or too little to see."""
        rows_rows, rows_keys, keys_keys, rows_s, keys_s = self._sums
        if rows_s <= 0:
            return 0.0
        determinant = rows_rows * keys_keys - rows_keys * rows_keys
        if determinant > 1e-6 * rows_rows * keys_keys:
            per_row = (rows_s * keys_keys - keys_s * rows_keys) / determinant
            per_key = (keys_s * rows_rows - rows_s * rows_keys) / determinant
            if per_row >= 0 and per_key >= 0:
                return per_row + per_key * depth
        return rows_s / rows_rows  # one depth only, or noise: the rate as it was
