"""Which sequences of a step begin in the same slots."""

from __future__ import annotations

from rapid.engines.attention.segments import Segment
from rapid.engines.attention.shared_prefixes import MIN_SHARED_KEYS, find_shared_prefixes


def segment(row: int, *past: tuple[int, int], num_rows: int = 1) -> Segment:
    """Rows whose own slots follow the last run."""
    *before, (start, stop) = past
    return Segment(row, row + num_rows, [*past], [*before, (start, stop + num_rows)])


def test_questions_about_one_document_share_it_and_keep_the_rest() -> None:
    (prefix,) = find_shared_prefixes(
        [
            segment(0, (0, 4010)),
            segment(1, (0, 4000), (9000, 9050)),
            segment(2, (0, 3984), (9600, 9700), num_rows=11),
        ]
    )
    assert prefix.spans == [(0, 3984)]
    assert {index: (rest.past, rest.all_spans) for index, rest in prefix.rests.items()} == {
        0: ([(3984, 4010)], [(3984, 4011)]),
        1: ([(3984, 4000), (9000, 9050)], [(3984, 4000), (9000, 9051)]),
        2: ([(9600, 9700)], [(9600, 9711)]),
    }


def test_a_document_counts_for_more_than_an_opening_that_all_have() -> None:
    opening = (0, 2 * MIN_SHARED_KEYS)
    found = find_shared_prefixes(
        [
            segment(0, opening, (10_000, 20_000)),
            segment(1, opening, (30_000, 31_000)),
            segment(2, opening, (10_000, 19_000), (40_000, 40_100)),
            segment(3, opening, (50_000, 50_001)),
        ]
    )
    assert [(prefix.spans, [*prefix.rests]) for prefix in found] == [
        ([opening, (10_000, 19_000)], [0, 2]),
        ([opening], [1, 3]),
    ]


def test_short_openings_prefills_and_strangers_share_nothing() -> None:
    short = (0, MIN_SHARED_KEYS - 1)
    assert find_shared_prefixes([segment(0, short), segment(1, short, (9000, 9500))]) == []
    chunk = segment(1, (0, 4000), (9000, 9001), num_rows=64)
    assert find_shared_prefixes([segment(0, (0, 4010)), chunk]) == []
    assert find_shared_prefixes([segment(0, (0, 4010)), segment(1, (5000, 9000))]) == []
    assert find_shared_prefixes([Segment(0, 1, [], [(7, 8)]), segment(1, (0, 4000))]) == []
