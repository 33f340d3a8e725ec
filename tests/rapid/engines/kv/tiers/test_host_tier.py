"""Pages in host memory: what is copied together, and when copying back is worth it."""

from __future__ import annotations

import torch

from rapid.engines.kv.cache import KVLayout
from rapid.engines.kv.tiers.host_tier import HostTier, Move, RestorePace, _join

A, B, C = (bytes([65 + i]) * 16 for i in range(3))


def host_of_two() -> HostTier:
    """A tier of two pages."""
    return HostTier(KVLayout(1, 1, torch.float32, (torch.device("cpu"),)), 2, 8)


async def test_neighbours_are_copied_at_once() -> None:
    moves = [Move(b"", 7 - i, 9 - i, is_restore=False) for i in range(4)]
    moves += [Move(b"", 2 + i, 6 + i, is_restore=True) for i in range(4)]
    moves += [Move(b"", 9, 1, is_restore=True)]
    joined = [(run[0].page, run[0].host_page, len(run)) for run in _join(moves)]
    assert joined == [(4, 6, 4), (2, 6, 4), (9, 1, 1)]


def test_a_pace_compares_what_it_has_measured() -> None:
    pace = RestorePace()
    assert pace.is_restoring_faster  # to be tried
    pace.observe_restored(10, 2.0)
    pace.observe_computed(10, 1.0)
    assert not pace.is_restoring_faster
    for _ in range(10):
        pace.observe_computed(10, 4.0)
    assert pace.is_restoring_faster


def test_a_slow_restore_is_tried_again_in_the_end() -> None:
    pace = RestorePace()
    pace.observe_restored(1, 2.0)
    pace.observe_computed(1, 1.0)
    num_computed = 0
    while not pace.is_restoring_faster:
        pace.fade()
        num_computed += 1
    assert 100 < num_computed < 2000


def test_what_leaves_the_engine_again_was_used_last() -> None:
    host = host_of_two()
    for name in (A, B, A, C):
        host.keep(name, 0)
    host.take_moves()
    for name in (A, B, C):
        host.restore(name, 0)
    assert [move.name for move in host.take_moves()] == [A, C]


def test_after_a_failed_copy_nothing_is_known_and_nothing_due() -> None:
    """What was ordered meanwhile might have read what was never written."""
    host = host_of_two()
    host.keep(A, 0)
    host.restore(A, 0)
    host.forget()
    assert not host.has_moves
    host.restore(A, 0)
    assert not host.has_moves
