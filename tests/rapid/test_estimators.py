"""Estimators over measured times, on made-up ones."""

from __future__ import annotations

from rapid.estimators import Patience, RunningMean, RunningMedian, Turnover


def test_patience_grows_with_the_longest_round_of_late_and_comes_back() -> None:
    patience = Patience(3.0)
    patience.observe(0.1)
    assert patience.limit_s == 3.0
    patience.observe(2.0)
    assert patience.limit_s == 20.0
    for _ in range(200):
        patience.observe(0.1)
    assert patience.limit_s == 3.0


def test_a_running_mean_takes_its_first_measurement_whole() -> None:
    mean = RunningMean(weight=0.25)
    assert mean.value is None
    mean.add(8.0)
    assert mean.value == 8.0
    mean.add(4.0)
    assert mean.value == 7.0


def test_a_running_median_ignores_an_outlier_and_counts_the_last_nine() -> None:
    median = RunningMedian()
    assert median.value is None
    for value in [1.0] * 8 + [1000.0]:
        median.add(value)
    assert median.value == 1.0
    for _ in range(5):
        median.add(5.0)
    assert median.value == 5.0  # of the last nine; it is 1 of all
    median.clear()
    assert median.value is None


class TestTurnover:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    def test_places_that_are_held_for_long_become_free_seldom(self) -> None:
        clock = self.Clock()
        turnover = Turnover(clock)
        assert turnover.seconds_until() is None
        with turnover.hold():
            clock.now = 8.0
        assert turnover.seconds_until() is None  # all places are free
        with turnover.hold(), turnover.hold(), turnover.hold(), turnover.hold():
            assert turnover.seconds_until() == 2.0
            assert turnover.seconds_until(6) == 12.0
            assert turnover.seconds_until(share=1) == 8.0

    def test_at_first_the_oldest_place_says_how_long_places_are_held(self) -> None:
        clock = self.Clock()
        turnover = Turnover(clock)
        with turnover.hold():
            clock.now = 6.0
            with turnover.hold():
                assert turnover.seconds_until() == 3.0
