"""The rows of one sequence: a step up to the limit, a prefill chunk beyond it."""

from __future__ import annotations

import pytest

from rapid.engines.attention.segments import MAX_STEP_ROWS, Segment


@pytest.mark.parametrize("first_row", [0, 1, 5 * MAX_STEP_ROWS])
def test_a_segment_is_a_step_by_its_number_of_rows_wherever_it_lies(first_row: int) -> None:
    def segment(num_rows: int) -> Segment:
        return Segment(first_row, first_row + num_rows, [], [(0, num_rows)])

    assert segment(1).is_step
    assert segment(MAX_STEP_ROWS).is_step
    assert not segment(MAX_STEP_ROWS + 1).is_step
