"""What is estimated online from measured times, and how."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass


@dataclass
class RunningMean:
    """An exponential average: the first value counts whole, each later one by `weight`."""

    weight: float = 0.2
    value: float | None = None

    def add(self, value: float) -> None:
        """Take one more measurement in."""
        known = value if self.value is None else self.value
        self.value = known + self.weight * (value - known)


class RunningMedian:
    """Of the last nine measurements: one that hung, or was interrupted, does not count."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=9)

    @property
    def value(self) -> float | None:
        """None before the first."""
        return statistics.median(self._values) if self._values else None

    def add(self, value: float) -> None:
        """Take one more measurement in."""
        self._values.append(value)

    def clear(self) -> None:
        """As before the first."""
        self._values.clear()
