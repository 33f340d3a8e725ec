from __future__ import annotations

import numpy as np
import pytest

from evaluation.reports.estimates import estimate_difference, mean, ratio, ratio_of_ratios


def test_an_interval_of_many_items_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    found = mean(list(values))
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=0.03
    )
    assert found.items == 400


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(2)
    samples = (list((rng.random(80) < 0.3).astype(float)) for _ in range(300))
    covered = sum(found.low <= 0.3 <= found.high for found in map(mean, samples))
    assert 0.90 < covered / 300 < 0.98


def test_a_pair_is_compared_more_sharply_than_two_means_are():
    rng = np.random.default_rng(3)
    theirs = rng.normal(size=100)
    ours = theirs + rng.normal(0.2, 0.1, size=100)
    difference = estimate_difference(list(ours), list(theirs))
    assert difference.value == pytest.approx(ours.mean() - theirs.mean())
    assert difference.sign == 1
    one = mean(list(ours))
    assert difference.high - difference.low < (one.high - one.low) / 4
    assert estimate_difference(list(theirs), list(ours)).sign == -1


def test_items_that_are_all_equal_have_no_spread():
    found = mean([1.0] * 7)
    assert (found.value, found.low, found.high) == (1.0, 1.0, 1.0)
    assert estimate_difference([0.5] * 3, [0.5] * 3).sign == 0
    assert mean([0.0]).high == 0.0


def test_a_ratio_is_of_totals_not_a_mean_of_ratios():
    found = ratio([1.0, 9.0], [10.0, 10.0])
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx((0.1, 0.9))
    assert ratio([1.0, 30.0], [1.0, 10.0]).value == pytest.approx(31 / 11)


def test_a_constant_ratio_has_no_spread_whatever_the_sizes():
    found = ratio([2.0, 8.0, 20.0], [1.0, 4.0, 10.0])
    assert (found.low, found.high) == pytest.approx((2.0, 2.0))


def test_a_speedup_is_paired_by_item():
    tokens = [10.0, 20.0, 90.0]
    seconds = [1.0, 4.0, 20.0]
    found = ratio_of_ratios((tokens, [s / 2 for s in seconds]), (tokens, seconds))
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_same_numbers_give_the_same_interval():
    values = list(np.random.default_rng(4).random(30))
    assert mean(values) == mean(values)


def test_nothing_is_estimated_from_nothing():
    with pytest.raises(ValueError, match="at least one item"):
        mean([])
    with pytest.raises(ValueError, match="denominator"):
        ratio([1.0], [0.0])
