"""What an engine concludes from recorded times; nothing here is timed."""

from __future__ import annotations

import pytest

from rapid.engines.batching import Feed
from rapid.engines.kv_cache import PageTable
from rapid.engines.timings import Gap, StepCosts


def test_drafting_ahead_goes_no_further_than_the_gap_allows() -> None:
    gap = Gap()
    assert gap.num_steps(0.002, at_most=10) == 10  # nothing is known yet
    gap.hand_out(now=1.0)
    gap.call(now=1.011)
    assert gap.num_steps(0.002, at_most=10) == 5
    assert gap.num_steps(0.002, at_most=3) == 3
    assert gap.num_steps(None, at_most=10) == 10
    for start in range(2, 40):  # from now on an answer takes 3 ms
        gap.hand_out(now=start)
        gap.call(now=start + 0.003)
    assert gap.num_steps(0.002, at_most=10) == 1
    gap.call(now=100.0)  # no block was out
    assert gap.num_steps(0.002, at_most=10) == 1


def chunk(num_rows: int, depth: int) -> list[Feed]:
    return [Feed([0] * num_rows, depth, PageTable((), 16), num_wanted=0)]


def seconds(base: float, num_rows: int, depth: int) -> float:
    """A machine on which a row costs 1 ms, and 1 us for every token before it."""
    return base + num_rows * (1e-3 + 1e-6 * (depth + num_rows / 2))


def learnt(base: float, depths: tuple[int, ...]) -> StepCosts:
    costs = StepCosts()
    costs.observe(base, [], is_mixed=False)
    for depth in depths:
        costs.observe(seconds(base, 16, depth), chunk(16, depth), is_mixed=True)
    return costs


@pytest.mark.parametrize("depth", [0, 4000, 64000])
def test_rows_are_as_many_as_the_slowdown_allows_at_their_depth(depth: int) -> None:
    costs = learnt(1.0, (1000, 2000, 8000))
    rows = costs.num_rows(1.5, depth, unknown=16)
    assert rows == pytest.approx(0.5 / (1e-3 + 1e-6 * depth), rel=0.02, abs=1)


def test_at_one_depth_the_rate_is_what_it_was() -> None:
    costs = learnt(1.0, (1000, 1000, 1000))
    assert costs.num_rows(2.0, 1000, unknown=16) == pytest.approx(1.0 / 2e-3, rel=0.02)


def test_a_row_always_goes_and_every_ninth_step_measures_what_it_costs() -> None:
    costs = learnt(1e-6, (1000,))
    allowed = []
    for _ in range(18):
        rows = costs.num_rows(2.0, 1000, unknown=16)
        allowed.append(rows)
        costs.observe(1e-6 + 1e-3 * rows, chunk(rows, 1000) if rows else [], is_mixed=rows > 0)
    assert allowed == [1] * 7 + [0] + [1] * 8 + [0] + [1]


def test_before_anything_is_known_the_first_step_goes_without() -> None:
    costs = StepCosts()
    assert costs.num_rows(2.0, 0, unknown=16) == 0
    costs.observe(0.5, chunk(512, 0), is_mixed=False)  # prefill alone: says nothing of others
    assert costs.num_rows(2.0, 0, unknown=16) == 0
    costs.observe(1.0, [], is_mixed=False)
    assert costs.num_rows(2.0, 0, unknown=16) == 16


def test_a_row_too_cheap_to_see_is_not_bounded_by_noise() -> None:
    costs = StepCosts()
    costs.observe(1.0, [], is_mixed=False)
    costs.observe(0.9, chunk(16, 100), is_mixed=True)  # faster with than without
    assert costs.num_rows(2.0, 100, unknown=16) == 16
