"""The work tables on the device: which sections they have, and their places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rapid.engines.attention.kernel_inputs import RaggedRows
from rapid.engines.attention.key_tables import KeyTables, TableSpace
from rapid.engines.attention.segments import Segment
from rapid.engines.attention.shared_prefixes import MIN_SHARED_KEYS
from rapid.engines.attention.work_items import BLOCK, ITEM, Sizes, work_table
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


def space_of(rows: RaggedRows, windows: Sequence[int | None], max_context: int) -> TableSpace:
    """Places for the tables of layers with these windows, behind 7 other numbers."""
    example = KeyTables(is_example=True)
    for window in windows:
        example.of(rows, CPU, window)
    return TableSpace([example], len(rows.segments), 7, max_context)


def unpack(table: torch.Tensor, sizes: Sizes) -> list[object]:
    """Whatever the kernels read of a table."""
    items = table[: sizes.rows_at].reshape(-1, ITEM)
    blocks = table[sizes.blocks_at :]
    read = [blocks[BLOCK * a : BLOCK * (a + n)].tolist() for _, _, a, n, _ in items.tolist()]
    return [items[:, [0, 1, 3, 4]].tolist(), table[sizes.rows_at : sizes.blocks_at].tolist(), read]


@pytest.mark.parametrize("windows", [[None], [64], [None, 64]], ids=str)
def test_tables_of_other_batches_are_read_from_the_places_of_the_first(
    windows: list[int | None],
) -> None:
    space = space_of(ALONE, windows, max_context=4096)
    memory = np.zeros(space.num_ints, dtype=np.int32)
    (tables,) = space.tables(torch.from_numpy(memory))
    for rows in (TOGETHER, ALONE, TOGETHER):
        assert space.fill(memory, [rows.segments]) is not None
        for window in windows:
            table, sizes = tables.of(rows, CPU, window)
            made = torch.from_numpy(work_table(rows.segments, sizes, window))
            assert unpack(table, sizes) == unpack(made, sizes)
            assert not table.storage_offset() % 4
    assert not memory[:7].any()


def test_a_batch_of_too_many_blocks_has_no_place() -> None:
    space = space_of(ALONE, [None], max_context=64)
    fragmented = [(3 * place, 3 * place + 1) for place in range(200)]
    memory = np.zeros(space.num_ints, dtype=np.int32)
    assert space.fill(memory, [ALONE.segments]) is not None
    assert space.fill(memory, [batch(fragmented, fragmented).segments]) is None
