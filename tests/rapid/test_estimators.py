"""Online estimators: what they make of measured times."""

from __future__ import annotations

import pytest

from rapid.estimators import Patience, RunningMean, RunningMedian


def test_the_first_measurement_of_a_running_mean_counts_whole():
    mean = RunningMean(0.25)
    assert mean.value is None
    mean.add(8.0)
    assert mean.value == 8.0
    mean.add(0.0)
    assert mean.value == 6.0


def test_a_running_median_is_that_of_the_last_nine():
    median = RunningMedian()
    assert median.value is None
    for value in [100.0] * 9 + [1.0, 2.0, 3.0, 4.0]:
        median.add(value)
    assert median.value == 100.0  # five of nine
    median.add(5.0)
    assert median.value == 5.0
    median.clear()
    assert median.value is None


def test_patience_is_ten_of_the_longest_recent_rounds():
    patience = Patience(floor_s=30.0)
    assert patience.limit_s == 30.0
    patience.observe(4.0)
    assert patience.limit_s == 40.0
    patience.observe(0.1)
    assert patience.limit_s == pytest.approx(39.6)
    for _ in range(100):
        patience.observe(0.1)
    assert patience.limit_s == 30.0
