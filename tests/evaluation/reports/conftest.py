from __future__ import annotations

import pytest

from tests.evaluation.reports.handmade import result, run_dir, task


@pytest.fixture
def small(tmp_path):
    """Plain is right on a quarter of 40 items, the drafter on half, boost on three quarters."""
    drafted = {"rounds": 3, "drafted": 12, "accepted": 9, "by_position": ((3, 3), (3, 2), (2, 1))}
    lines = []
    for number in range(40):
        place = number // 2 % 4
        lines += [
            result(number, "plain", float(place == 0)),
            result(number, "rag-drafter", float(place in (1, 2)), evidence_found=place != 3),
            result(number, "rapid-boost", float(place < 3), ms={"decode": 50.0}, **drafted),
        ]
    return run_dir(tmp_path / "run", task("plain", "rag-drafter", "rapid-boost"), lines)
