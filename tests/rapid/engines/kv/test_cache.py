"""Pages: runs, holders, and what happens when they are given back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.engines.kv.cache import KVCache, KVLayout, OutOfPages, PagePool, PageRun, PageTable


def test_one_run_when_one_fits_and_the_tightest_of_them() -> None:
    pool = PagePool(20)
    a, b, c, d = (pool.allocate(n) for n in (4, 6, 3, 7))
    pool.free(a)
    pool.free(c)
    assert pool.allocate(3) == c  # not the 4 pages of a
    pool.free(b)
    assert pool.allocate(8) == (PageRun(0, 8),)  # a and b have become one
    assert d == (PageRun(13, 20),)
    pool.check_integrity()


def test_several_runs_when_none_is_long_enough() -> None:
    pool = PagePool(10)
    held = [pool.allocate(2) for _ in range(5)]
    pool.free(held[1])
    pool.free(held[3])
    assert pool.allocate(3) == (PageRun(2, 3), PageRun(6, 8))
    assert pool.num_free == 1
    with pytest.raises(OutOfPages):
        pool.allocate(2)
    pool.check_integrity()


def test_a_shared_page_is_free_when_its_last_holder_leaves() -> None:
    pool = PagePool(8)
    (run,) = pool.allocate(5)
    shared = (PageRun(run.start, run.start + 2),)
    pool.share(shared)
    pool.free((run,))
    assert pool.num_in_use == 2
    pool.check_integrity(held=[shared])
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity(held=[])
    pool.free(shared)
    assert pool.num_free == 8
    pool.check_integrity(held=[])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_the_ledger_balances_after_any_history(moves: list[tuple[bool, int]]) -> None:
    pool = PagePool(24)
    held: list[tuple[PageRun, ...]] = []
    for is_free, size in moves:
        if is_free and held:
            pool.free(held.pop(size % len(held)))
        elif size <= pool.num_free:
            held.append(pool.allocate(size))
            assert sum(map(len, held[-1])) == size
        pool.check_integrity(held)
    assert pool.num_in_use == sum(len(run) for runs in held for run in runs)


def test_a_table_maps_positions_to_slots_over_its_runs() -> None:
    table = PageTable([PageRun(2, 3), PageRun(3, 4), PageRun(9, 11)], page_tokens=4)
    assert table.runs == (PageRun(2, 4), PageRun(9, 11))
    assert table.num_tokens == 16
    assert table.spans(0, 16) == [(8, 16), (36, 44)]
    assert table.spans(3, 9) == [(11, 16), (36, 37)]
    assert table.spans(8, 8) == []


def runs_of(lengths: list[int]) -> list[PageRun]:
    """Runs of so many pages, neither adjacent nor in the order of their slots."""
    runs, start = [], 1
    for length in lengths:
        runs.append(PageRun(start, start + length))
        start += length + 1
    return runs[1::2] + runs[::2]


def slots_of(table: PageTable) -> list[int]:
    return [slot for run in table.runs for slot in range(run.start * 4, run.stop * 4)]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=6), st.data())
def test_spans_and_blocks_are_those_of_the_tokens_at_their_positions(
    lengths: list[int], data: st.DataObject
) -> None:
    table = PageTable(runs_of(lengths), page_tokens=4)
    slots = slots_of(table)
    for _ in range(4):  # one table, from which all calls cut what they need
        stop = data.draw(st.integers(0, len(slots)))
        start = data.draw(st.integers(0, stop))
        spans = table.spans(start, stop)
        assert [slot for span in spans for slot in range(*span)] == slots[start:stop]
        size = data.draw(st.sampled_from([3, 16]))
        position, expected = start, []
        for first, end in spans:
            for slot in range(first, end, size):
                num_tokens = min(size, end - slot)
                expected.append([slot, position, num_tokens])
                position += num_tokens
        assert table.blocks(start, stop, size).tolist() == expected


def test_copy_moves_slots_across_runs() -> None:
    layout = KVLayout(2, 4, torch.float32, (torch.device("cpu"),) * 3)
    cache = KVCache(layout, num_pages=8, page_tokens=4)
    for keys, values in cache.layers:
        keys.normal_()
        values.normal_()
    cache.copy([(2, 4), (10, 11)], [(20, 28)])
    for layer in cache.layers:
        for tensor in layer:
            assert torch.equal(tensor[:, 20:23], tensor[:, [2, 3, 10]])
    assert layout.bytes_per_token == 2 * 3 * 2 * 4 * 4
