"""What an engine concludes from recorded times; nothing here is timed."""

from __future__ import annotations

import pytest

from rapid.engines.attention.batch import Feed
from rapid.engines.execution.timings import StepCosts
from rapid.engines.kv.cache import PageTable
from rapid.engines.kv.sequences import Gap


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
    costs.observe(base, [], is_alone=False)
    for depth in depths:
        costs.observe(seconds(base, 16, depth), chunk(16, depth), is_alone=False)
    return costs


@pytest.mark.parametrize("depth", [1000, 4000, 8000])
def test_what_a_row_adds_is_learnt_with_its_depth(depth: int) -> None:
    costs = learnt(1.0, (1000, 2000, 8000) * 5)
    assert costs.row_s(depth) == pytest.approx(1e-3 + 1e-6 * depth, rel=0.02)


def test_at_one_depth_the_rate_is_what_it_was() -> None:
    costs = learnt(1.0, (1000, 1000, 1000))
    assert costs.row_s(1000) == pytest.approx(2e-3, rel=0.02)


def test_a_deeper_prompt_is_followed() -> None:
    costs = learnt(1.0, tuple(range(0, 64_000, 500)))
    assert costs.row_s(64_000) == pytest.approx(65e-3, rel=0.05)


def test_what_a_step_takes_before_its_rows_is_learnt_where_they_are_alone() -> None:
    costs = StepCosts()
    costs.observe(1.0, [], is_alone=False)
    assert costs.start_s == 1.0  # a guess
    for rows in (16, 64, 300) * 30:
        costs.observe(0.2 + 1e-3 * rows, chunk(rows, 0), is_alone=True)
    assert costs.start_s == pytest.approx(0.2, rel=0.05)
    assert costs.row_s(0) == pytest.approx(1e-3, rel=0.05)


def test_the_base_is_measured_again_once_the_caches_are_warm() -> None:
    costs = StepCosts()
    assert costs.is_base_due
    costs.observe(0.5, chunk(512, 0), is_alone=True)  # says nothing of others
    assert costs.is_base_due
    for _ in range(6):
        costs.observe(1.0, [], is_alone=False)
    for _ in range(48):
        assert not costs.is_base_due
        costs.observe(1.1, chunk(16, 100), is_alone=False)
    for cold_s in (3.0, 2.8, 2.6):
        costs.observe(cold_s, [], is_alone=False)
    assert costs.base_s.value == pytest.approx(1.0)
    for _ in range(3):
        assert costs.is_base_due
        costs.observe(2.0, [], is_alone=False)
    assert not costs.is_base_due
    for _ in range(2):
        costs.observe(2.0, [], is_alone=False)  # no prefill was in between
    assert costs.base_s.value == pytest.approx(2.0)


def test_a_step_that_was_interrupted_is_not_taken_for_the_base() -> None:
    costs = StepCosts()
    for seconds in (1.0, 1.1, 30.0, 0.9, 1.0):
        costs.observe(seconds, [], is_alone=False)
    assert costs.base_s.value == 1.0


def test_who_always_comes_after_a_chunk_is_measured_as_it_is() -> None:
    """Away for long between two calls, it finds the caches full of a prompt each time."""
    costs = StepCosts()
    costs.observe(1.0, [], is_alone=False)
    for _ in range(48 + 6):
        costs.observe(0.5, chunk(64, 0), is_alone=True)
        costs.observe(2.0, [], is_alone=False)
    assert costs.base_s.value == pytest.approx(2.0)


def test_a_row_too_cheap_to_see_costs_nothing() -> None:
    costs = StepCosts()
    costs.observe(1.0, [], is_alone=False)
    costs.observe(0.9, chunk(16, 100), is_alone=False)  # faster with than without
    assert costs.row_s(100) == 0
    assert costs.mean_row_s == pytest.approx(0.9 / 16)


def test_a_step_is_expected_to_take_what_such_steps_took() -> None:
    costs = StepCosts()
    assert costs.estimate_s([], is_alone=False) is None
    assert costs.estimate_s(chunk(16, 0), is_alone=True) is None
    for rows in (16, 64, 256) * 5:
        costs.observe(0.2 + 1e-3 * rows, chunk(rows, 0), is_alone=True)
    assert costs.estimate_s([], is_alone=False) is None
    assert costs.estimate_s(chunk(512, 0), is_alone=True) == pytest.approx(0.712, rel=0.1)
    for _ in range(4):  # the first three find the caches full of the prompt
        costs.observe(0.5, [], is_alone=False)
    assert costs.estimate_s([], is_alone=False) == 0.5
    beside = costs.estimate_s([*chunk(256, 0), *chunk(256, 0)], is_alone=False)
    assert beside == pytest.approx(1.012, rel=0.1)


def test_while_the_base_is_measured_again_steps_are_expected_to_take_what_they_took() -> None:
    """Else a step that does not end at this moment would count as one of unknown cost."""
    costs = StepCosts()
    costs.observe(0.5, [], is_alone=False)
    costs.forget_base()
    assert costs.is_base_due
    assert costs.estimate_s([], is_alone=False) == 0.5
    costs.observe(0.8, [], is_alone=False)
    assert costs.estimate_s([], is_alone=False) == 0.8


def test_the_speed_of_reading_is_that_of_the_latest_steps_with_a_prompt() -> None:
    costs = StepCosts()
    assert costs.prefill_tokens_per_s == 0
    costs.observe(1.0, [], is_alone=False)
    assert costs.prefill_tokens_per_s == 0
    costs.observe(2.0, chunk(64, 0), is_alone=False)
    assert costs.prefill_tokens_per_s == pytest.approx(32)
    for _ in range(60):
        costs.observe(0.5, chunk(64, 4000), is_alone=True)
        costs.observe(9.0, [], is_alone=False)
    assert costs.prefill_tokens_per_s == pytest.approx(128, rel=0.02)
