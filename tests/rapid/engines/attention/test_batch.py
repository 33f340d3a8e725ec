"""Feeds side by side: positions, slots, and which rows need logits."""

from __future__ import annotations

import torch

from rapid.engines.attention.batch import Feed, assemble
from rapid.engines.kv.cache import KVCache, PageRun, PageTable
from tests.rapid.tiny_models import loaded

CPU = torch.device("cpu")


def test_rows_keep_their_own_positions_and_slots() -> None:
    feeds = [
        Feed([7, 8, 9], 0, PageTable([PageRun(5, 6)], 4), num_wanted=0),
        Feed([4], 6, PageTable([PageRun(1, 2), PageRun(8, 9)], 4), num_wanted=1),
        Feed([5, 6, 7], 3, PageTable([PageRun(2, 4)], 4), num_wanted=2),
    ]
    batch = assemble(feeds, KVCache(loaded().kv_layout, 32, page_tokens=4), CPU)
    assert batch.input_ids.tolist() == [[7, 8, 9, 4, 5, 6, 7]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 6, 3, 4, 5]]
    assert batch.wanted.tolist() == [3, 5, 6]
    assert batch.rows.slots.tolist() == [20, 21, 22, 34, 11, 12, 13]
    assert batch.rows.segments[1].past == [(4, 8), (32, 34)]
    assert batch.rows.segments[1].all_spans == [(4, 8), (32, 35)]
