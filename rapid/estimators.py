"""Online estimators over measured times.

The estimators hold no knowledge of the hardware: every figure comes from measurements made while
serving. ``docs/constants.md`` explains where each one is used, with the source of every constant.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_TIMES_THE_LONGEST = 10.0  # the limit, in longest recent rounds
_FORGET = 0.99  # factor on the longest round for every shorter one


@dataclass
class RunningMean:
    """An exponential moving average.

    Attributes:
        weight: Weight of each measurement after the first, which counts whole.
        value: The average; None before the first measurement.
    """

    weight: float = 0.2
    value: float | None = None

    def add(self, value: float) -> None:
        """Add a measurement."""
        known = value if self.value is None else self.value
        self.value = known + self.weight * (value - known)


class RunningMedian:
    """The median of the last nine measurements, which a single outlier does not affect."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=9)

    @property
    def value(self) -> float | None:
        """The median, or None before the first measurement."""
        return statistics.median(self._values) if self._values else None

    def add(self, value: float) -> None:
        """Add a measurement."""
        self._values.append(value)

    def clear(self) -> None:
        """Drop all measurements."""
        self._values.clear()


class Patience:
    """The time limits after which an engine counts as hung, shared by all requests of a process.

    The limit for a drafter is ten times the longest recent round, but at least `floor_s` seconds.
    It follows the longest round and not the usual one, because a round waits for other work of the
    engines. An engine that verifies has no limit while it gives signs of life.

    Attributes:
        silent_s: The longest wait for such a sign, in seconds.
    """

    def __init__(self, floor_s: float, silent_s: float = 10.0) -> None:
        self._longest_s = 0.0
        self.allow(floor_s, silent_s)

    def allow(self, floor_s: float, silent_s: float) -> None:
        """Take other limits, in seconds, and keep what was observed."""
        self.silent_s = silent_s
        self._floor_s = floor_s

    @property
    def limit_s(self) -> float:
        """The longest wait, in seconds."""
        return max(self._floor_s, _TIMES_THE_LONGEST * self._longest_s)

    def observe(self, seconds: float) -> None:
        """Record the duration of a round with a drafter, in seconds."""
        self._longest_s = max(seconds, _FORGET * self._longest_s)


class Turnover:
    """The pace at which places become free, as measured while they are held.

    By Little's law as many places become free in a second as are held, divided by the seconds that
    each is held on average.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held_s = RunningMean()
        self._numbers = itertools.count()
        self._began: dict[int, float] = {}  # oldest first

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a place for the duration of the context."""
        number = next(self._numbers)
        self._began[number] = self._clock()
        try:
            yield
        finally:
            self._held_s.add(self._clock() - self._began.pop(number))

    def seconds_until(self, num_free: int = 1, *, share: int | None = None) -> float | None:
        """Return the seconds until `num_free` places become free, by the pace so far.

        Before any place has become free, the time that the oldest has been held stands for the time
        that places are held. None is returned where no place is held. With `share` the places must
        be of that many held ones.
        """
        if not self._began:
            return None
        held_s = self._held_s.value
        if held_s is None:
            held_s = self._clock() - next(iter(self._began.values()))
        return num_free * held_s / (share or len(self._began))
