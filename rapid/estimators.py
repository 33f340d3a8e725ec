"""Estimates made online from measured times.

Nothing here knows about hardware: every figure is learnt from what was measured while serving. Who
estimates what, with which of these, and where the constants come from: ``docs/performance.md``.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

_TIMES_THE_LONGEST = 10.0
_FORGET = 0.99  # of the longest round, with each that is shorter


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


class Patience:
    """The time that a drafter may take before it counts as hung; shared by a process's requests.

    It is never less than `floor_s`, and ten times what the longest round of late took: a round
    waits for whatever else the engines do, so that its usual length says little and its longest
    much.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._longest_s = 0.0

    @property
    def limit_s(self) -> float:
        """The longest wait, in seconds."""
        return max(self._floor_s, _TIMES_THE_LONGEST * self._longest_s)

    def observe(self, seconds: float) -> None:
        """Take in how long a round with a drafter took."""
        self._longest_s = max(seconds, _FORGET * self._longest_s)
