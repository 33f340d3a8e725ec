"""The work tables on the device: which sections they have, and when they can be refilled."""

from __future__ import annotations

import torch

from rapid.engines.attention.kernel_inputs import RaggedRows
from rapid.engines.attention.key_tables import KeyTables
from rapid.engines.attention.segments import Segment
from rapid.engines.attention.shared_prefixes import MIN_SHARED_KEYS
from rapid.engines.kv.cache import KVCache, KVLayout

CPU = torch.device("cpu")
DOCUMENT = (0, 2 * MIN_SHARED_KEYS)


def batch(*spans: list[tuple[int, int]]) -> RaggedRows:
    """Sequences of one row each; of their slots nothing is read here."""
    cache = KVCache(KVLayout(1, 16, torch.float32, (CPU,)), 1, 16)
    segments = [
        Segment(row, row + 1, [*own[:-1], (own[-1][0], own[-1][1] - 1)], own)
        for row, own in enumerate(spans)
    ]
    return RaggedRows(cache, segments, torch.arange(len(segments)))


ALONE = batch([(3000, 3100)], [(4000, 4100)])
TOGETHER = batch([DOCUMENT, (3000, 3100)], [DOCUMENT, (4000, 4100)])


def test_only_batches_that_share_a_prefix_have_items_for_it() -> None:
    assert KeyTables().of(ALONE, CPU, None)[1].shared_items == 0
    assert KeyTables().of(TOGETHER, CPU, None)[1].shared_items > 0
    assert KeyTables().of(TOGETHER, CPU, 64)[1].shared_items == 0


def test_a_table_of_a_graph_has_the_same_sections_for_every_batch() -> None:
    tables = KeyTables(max_context=4096)
    table, sizes = tables.of(ALONE, CPU, None)
    assert tables.refill(TOGETHER.segments)
    refilled, again = tables.of(TOGETHER, CPU, None)
    assert refilled is table
    assert again == sizes
    made, _ = KeyTables(max_context=0).of(TOGETHER, CPU, None)
    assert torch.equal(table[: len(made)], made)


def test_every_window_has_a_table_and_all_are_refilled() -> None:
    tables = KeyTables(max_context=4096)
    kept = {window: tables.of(ALONE, CPU, window)[0] for window in (None, 64)}
    before = {window: table.clone() for window, table in kept.items()}
    assert tables.refill(TOGETHER.segments)
    for window, table in kept.items():
        assert tables.of(TOGETHER, CPU, window)[0] is table
        assert not torch.equal(table, before[window])


def test_a_batch_of_too_many_blocks_leaves_all_tables_as_they_are() -> None:
    tables = KeyTables(max_context=64)
    table, _ = tables.of(ALONE, CPU, None)
    before = table.clone()
    fragmented = [(3 * place, 3 * place + 1) for place in range(200)]
    assert not tables.refill(batch(fragmented, fragmented).segments)
    assert torch.equal(table, before)
