"""How long rings are, when an engine has them, and what they save."""

from __future__ import annotations

from rapid.config import MAX_DRAFT, EngineConfig
from rapid.engines.forward.tiles import TILE_ROWS
from rapid.planning import ring_sizes
from rapid.planning.ring_sizes import RingPlan, ring_plan, tokens_in_rings


def config(**settings: object) -> EngineConfig:
    defaults = {"kv_cache_tokens": 131072, "max_leases": 4, "step_tokens": 4096}
    return EngineConfig(model="any", **defaults | settings)


def test_a_ring_has_room_for_a_block_and_as_much_drafted_ahead_and_for_a_tile() -> None:
    assert ring_sizes._SPECULATED == 2 * MAX_DRAFT
    assert ring_sizes._TILE == TILE_ROWS


def test_a_ring_is_a_window_and_a_chunk_long_however_long_the_text() -> None:
    plan = ring_plan(config(), 1024)
    assert plan is not None
    assert (plan.kept_tokens, plan.ring_tokens) == (1024 + 32, 1024 + 32 + 512 + 16)
    assert plan.num_tokens == 4 * plan.ring_tokens + plan.num_kept * plan.kept_tokens
    short = ring_plan(config(step_tokens=64), 1024)
    assert short is not None
    assert short.ring_tokens == 1024 + 32 + 128 + 16


def test_kept_windows_take_no_more_than_an_eighth_of_the_pool() -> None:
    assert [ring_plan(config(kv_cache_tokens=n), 1024).num_kept for n in (16384, 65536, 2**20)] == [
        1, 7, 16,
    ]  # fmt: skip


def test_pages_hold_all_layers_without_windows_and_where_rings_save_nothing() -> None:
    assert ring_plan(config(), None) is None
    assert ring_plan(config(kv_cache_tokens=4096), 1024) is None
    assert ring_plan(config(host_cache_tokens=4096), 1024) is None


def test_reading_begins_with_the_page_in_which_the_window_begins() -> None:
    plan = RingPlan(24, 8, 64, 1, 1)
    assert [plan.first_seen(position) for position in (0, 23, 24, 31, 32, 39)] == [
        0,
        0,
        0,
        8,
        8,
        16,
    ]


def test_a_sequence_s_share_is_that_of_an_engine_full_of_such_sequences() -> None:
    for context in (8192, 32768, 131072):
        plan = ring_plan(config(kv_cache_tokens=64 * context, max_leases=64), 1024)
        assert plan is not None
        share = tokens_in_rings(1024, context, 16, 4096)
        assert share is not None
        assert 0 <= 64 * share - plan.num_tokens < plan.kept_tokens
    assert tokens_in_rings(1024, 1500, 16, 4096) is None
