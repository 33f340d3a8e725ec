"""The batches that attention kernels are checked on hold what kernels fail at."""

from __future__ import annotations

import math

from rapid.engines.attention.segments import MAX_STEP_ROWS
from tests.rapid.engines.attention.small_cases import step_cases


def test_checks_are_batches_of_every_row_count_with_scattered_pages() -> None:
    cases = step_cases()
    rows = {s.stop - s.start for case in cases for s in case.inputs.rows.segments}
    assert rows == set(range(1, MAX_STEP_ROWS + 1))
    assert all(len(case.inputs.rows.segments) >= 2 for case in cases)
    assert all(max(len(s.all_spans) for s in case.inputs.rows.segments) > 3 for case in cases)
    for case in cases:
        assert case.expected is not None
        assert case.expected.isfinite().all()  # no slot of nobody's in the specification
        assert math.isnan(float(case.inputs.rows.cache.layers[0][0].sum()))
