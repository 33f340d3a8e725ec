"""`benchmarks/text/evidence_retrieved.py`: how well a number tells states of retrieval apart."""

from __future__ import annotations

from benchmarks.text import evidence_retrieved


def test_a_row_has_quartiles_area_and_the_share_above_each_least_number() -> None:
    values = {"found": [0.4, 0.6, 0.8, 1.0], "missed": [0.1, 0.2, 0.5, 0.5], "same": [0.4, 1.0]}
    rows = evidence_retrieved._by_state(values, [0.3, 0.7]).splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert cells[0][2:] == ["0.70 (0.55 to 0.85)", "", "1.00", "0.50"]
    assert cells[1][2:] == ["0.35 (0.18 to 0.50)", "0.88 (0.50 to 1.00)", "0.50", "0.00"]
    assert cells[2][3].startswith("0.50 (")
