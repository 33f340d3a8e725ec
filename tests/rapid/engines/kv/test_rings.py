"""Rings of slots, their ledger, and the windows that are kept for later prompts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.engines.kv.cache import KVCache, KVLayout, OutOfPages
from rapid.engines.kv.rings import KeptWindows, Ring, RingPool
from rapid.planning.ring_sizes import RingPlan

PLAN = RingPlan(window=24, page_tokens=8, max_rows=32, num_rings=3, num_kept=2)
CPU = torch.device("cpu")


def slots(ring: Ring, start: int, stop: int) -> list[int]:
    return [slot for span in ring.spans(start, stop) for slot in range(*span)]


def cache_of(plan: RingPlan = PLAN) -> KVCache:
    """Layers of which the second has rings, where a slot's keys are its number."""
    layout = KVLayout(1, 1, torch.float32, (CPU,) * 2, window=plan.window, sliding=(False, True))
    cache = KVCache(layout, 4, plan.page_tokens, num_ring_slots=plan.num_tokens)
    for keys, values in cache.layers:
        for tensor in (keys, values):
            tensor[0, :, 0] = torch.arange(tensor.shape[1])
    return cache


def test_a_token_lies_where_the_one_that_left_its_ring_lay() -> None:
    ring = Ring(100, 10, PLAN)
    assert ring.spans(0, 10) == [(100, 110)]
    assert ring.spans(7, 13) == [(107, 110), (100, 103)]
    assert ring.spans(20, 23) == [(100, 103)]
    assert ring.spans(17, 20) == [(107, 110)]
    assert ring.spans(5, 5) == []


@given(st.data())
@settings(max_examples=200)
def test_what_the_plan_lets_rows_write_overwrites_nothing_that_rows_read(data) -> None:
    """Any history of chunks, speculation and rollbacks: every slot read holds its own position."""
    plan = RingPlan(
        window=data.draw(st.integers(1, 40), "window"),
        page_tokens=data.draw(st.sampled_from([1, 4, 16]), "page"),
        max_rows=data.draw(st.integers(16, 64), "chunk"),
        num_rings=1,
        num_kept=1,
    )
    ring = RingPool(plan).take()
    holds: dict[int, int] = {}
    settled = computed = 0  # tokens that stay, and those whose keys are valid
    for _ in range(data.draw(st.integers(1, 12), "moves")):
        is_block = settled - computed < 16 and data.draw(st.booleans(), "is a block")
        if is_block:
            most = plan.room if settled == computed else 16 - (settled - computed)
            stop = settled + data.draw(st.integers(1, most), "drafted")
        else:
            stop = computed + data.draw(st.integers(1, plan.max_rows), "chunk")
        ring.write(computed, stop)
        for position in range(computed, stop):
            holds[slots(ring, position, position + 1)[0]] = position
        tile = computed - computed % 16  # a deterministic engine reads what its first row reads
        for first in {plan.first_seen(computed), plan.first_seen(tile)}:
            assert [holds[slot] for slot in slots(ring, first, stop)] == list(range(first, stop))
        if is_block:
            accepted = data.draw(st.integers(settled, stop), "accepted")
            settled, computed = accepted + data.draw(st.integers(0, 1), "corrected"), accepted
        else:
            settled, computed = max(settled, stop), stop


def test_rows_whose_window_is_gone_are_refused() -> None:
    ring = RingPool(PLAN).take()
    ring.write(0, 32)
    ring.write(200, 232)
    with pytest.raises(AssertionError, match="left behind"):
        ring.write(60, 61)
    restored = Ring(0, PLAN.ring_tokens, PLAN, start=80, stop=128)
    restored.write(128, 130)
    with pytest.raises(AssertionError, match="left behind"):
        restored.write(90, 91)


def test_a_ring_has_one_holder() -> None:
    pool = RingPool(PLAN)
    rings = [pool.take() for _ in range(PLAN.num_rings)]
    assert len({ring.first for ring in rings}) == PLAN.num_rings
    assert pool.num_free == 0
    pool.check_integrity(rings)
    with pytest.raises(OutOfPages):
        pool.take()
    pool.free(rings[1])
    pool.check_integrity([rings[0], rings[2]])
    with pytest.raises(AssertionError, match="holders and counts differ"):
        pool.check_integrity(rings)
    assert pool.take().first == rings[1].first


def test_a_kept_window_comes_back_as_it_was_and_touches_no_page() -> None:
    cache = cache_of()
    kept, pool = KeptWindows(PLAN, cache), RingPool(PLAN)
    source, ring = pool.take(), pool.take()
    source.write(0, 150)
    first = kept.first_kept(144)
    want = cache.layers[1][0][0, slots(source, first, 144), 0].clone()
    kept.keep(b"name", source, 144)
    cache.layers[1][0][0, slots(source, first, 150), 0] = -1.0
    kept.restore(b"name", ring, 144)
    assert torch.equal(cache.layers[1][0][0, slots(ring, first, 144), 0], want)
    assert (ring.start, ring.stop) == (first, 144)
    assert torch.equal(cache.layers[0][0][0, :, 0], torch.arange(32.0))


def test_what_a_ring_does_not_hold_any_more_is_not_kept() -> None:
    kept, ring = KeptWindows(PLAN, cache_of()), RingPool(PLAN).take()
    ring.write(0, 32)
    ring.write(300, 332)
    with pytest.raises(AssertionError, match="is not in"):
        kept.keep(b"name", ring, 160)


def test_the_window_that_was_not_used_for_longest_leaves_first() -> None:
    kept, ring = KeptWindows(PLAN, cache_of()), RingPool(PLAN).take()
    ring.write(0, 64)
    indices = {b"a": 2, b"b": 4, b"c": 7}
    kept.keep(b"a", ring, 24)
    kept.keep(b"b", ring, 40)
    kept.keep(b"a", ring, 24)
    kept.keep(b"c", ring, 64)
    assert kept.last(indices, 0, 8) == 8
    assert kept.last(indices, 0, 7) == 3
    assert kept.last(indices, 3, 7) == 3
    assert kept.last({b"other": 3}, 1, 8) == 1


def test_windows_are_kept_at_a_prompt_s_end_and_ever_further_before_it() -> None:
    kept = KeptWindows(PLAN, cache_of())
    assert kept.points(300) == {300, 297, 276, 108}
    assert kept.points(2) == {2}
    assert kept.points(0) == set()


def test_a_ring_holds_as_many_of_the_last_tokens_as_it_has_slots() -> None:
    ring = Ring(0, PLAN.ring_tokens, PLAN, stop=PLAN.ring_tokens + 5)
    assert ring.holds(5)
    assert not ring.holds(4)
