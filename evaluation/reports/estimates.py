"""Bootstrap estimates over items: a mean, difference or ratio with its 95 % interval.

Intervals are percentile intervals of 10,000 seeded resamples (Efron and Tibshirani, *An
Introduction to the Bootstrap*, 1993, chapter 13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
LEVEL = 0.95
# Items from which an interval is told: resamples of fewer repeat the same few, and two items that
# are both right would be a sure 1.
LEAST_ITEMS = 10

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval, from `low` to `high`, of so many items."""

    value: float
    low: float
    high: float
    items: int

    @property
    def has_interval(self) -> bool:
        """Whether there are items enough for the interval to mean something."""
        return self.items >= LEAST_ITEMS

    @property
    def sign(self) -> int:
        """1 or -1 if there is an interval that is wholly above or below zero, else 0."""
        return (int(self.low > 0) - int(self.high < 0)) if self.has_interval else 0


def mean(values: Sequence[float]) -> Estimate:
    """Estimate the mean over items.

    Raises:
        ValueError: There are no items.
    """
    column = _columns(values)
    return _estimate(column, lambda sums: sums[:, 0] / len(values))


def estimate_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Estimate the mean of ``ours - theirs``, given for the same items in the same order.

    Raises:
        ValueError: There are no items.
    """
    columns = _columns(ours, theirs)
    return _estimate(columns, lambda sums: (sums[:, 0] - sums[:, 1]) / len(ours))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Estimate the ratio of two totals over the same items: accepted to drafted, tokens to seconds.

    Raises:
        ValueError: There are no items, or the denominators of all of them are zero.
    """
    columns = _columns(numerators, denominators)
    if not columns[:, 1].any():
        raise ValueError("a ratio needs an item whose denominator is not zero")
    return _estimate(columns, lambda sums: sums[:, 0] / sums[:, 1])


def ratio_of_ratios(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]]
) -> Estimate:
    """Estimate a speedup, which is one ratio of totals over another, paired by item.

    Raises:
        ValueError: There are no items, or one of the four parts is zero in all of them.
    """
    columns = _columns(*ours, *theirs)
    if not columns.any(axis=0).all():
        raise ValueError("a ratio of ratios needs items whose four parts are not zero")
    return _estimate(columns, lambda sums: sums[:, 0] / sums[:, 1] / (sums[:, 2] / sums[:, 3]))


def _columns(*columns: Sequence[float]) -> Floats:
    """Stack sequences of one number per item into an array, `[items, columns]`."""
    if not columns[0]:
        raise ValueError("an estimate needs at least one item")
    return np.array(list(zip(*columns, strict=True)), dtype=np.float64)


def _estimate(columns: Floats, of_sums: Callable[[Floats], Floats]) -> Estimate:
    value = of_sums(columns.sum(axis=0, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = of_sums(_counts(len(columns)) @ columns)
    # A resample whose denominators are all zero has no ratio and is left out.
    low, high = np.quantile(drawn[np.isfinite(drawn)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value[0]), float(low), float(high), len(columns))


@lru_cache(maxsize=4)
def _counts(items: int) -> Floats:
    """Return how often each resample draws each item, `[resamples, items]`."""
    rng = np.random.default_rng(items)
    return rng.multinomial(items, np.full(items, 1 / items), size=RESAMPLES).astype(np.float64)
