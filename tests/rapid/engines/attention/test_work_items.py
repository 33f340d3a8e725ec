"""How a step's keys are divided among programs, and how often each is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.engines.attention.batch import Feed, rows_of
from rapid.engines.attention.segments import Segment
from rapid.engines.attention.work_items import (
    BLOCK,
    BLOCK_KEYS,
    ITEM,
    MAX_PARTS,
    ROW,
    Sizes,
    tiling_of,
    work_table,
)
from rapid.engines.forward.graphs.buckets import bucket_of, pad_rows
from rapid.engines.kv import cache
from rapid.engines.kv.cache import PageRun, PageTable

PROCESSORS, KV_HEADS, HEAD_DIM = 132, 8, 128  # an H100, a layer of Llama-3.1-8B
DOCUMENT = 131_072 - 64
PAGE = 64


@dataclass
class Table:
    """The sections of a work table."""

    sizes: Sizes
    own: np.ndarray
    shared: np.ndarray
    rows: np.ndarray
    blocks: np.ndarray

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in bfloat16 that one layer's programs read."""
        read = 0
        for _, _, first, num_blocks, _ in np.concatenate([self.own, self.shared]):
            read += int(self.blocks[first : first + num_blocks, 2].sum())
        return read * KV_HEADS * HEAD_DIM * 2 * 2


def table_of(
    segments: list[Segment],
    window: int | None = None,
    extra_rows: int = 0,
    kv_heads: int = KV_HEADS,
) -> Table:
    num_rows = max((one.stop for one in segments), default=0) + extra_rows
    sizes = Sizes.of(num_rows, len(segments), kv_heads, PROCESSORS)
    table = work_table(segments, sizes, window)
    items = table[: sizes.rows_at].reshape(-1, ITEM)
    rows = table[sizes.rows_at : sizes.blocks_at].reshape(-1, ROW)
    blocks = table[sizes.blocks_at :].reshape(-1, BLOCK)
    return Table(sizes, items[: sizes.own_items], items[sizes.own_items :], rows, blocks)


def steps(*lengths: int, rows: int = 1) -> list[Segment]:
    """Sequences of so many keys each, in runs of their own."""
    segments, slot = [], 0
    for index, length in enumerate(lengths):
        first, past = index * rows, [(slot, slot + length - rows)] if length > rows else []
        segments.append(Segment(first, first + rows, past, [(slot, slot + length)]))
        slot += length + 10
    return segments


def questions(number: int, rows: int = 1) -> list[Segment]:
    """Sequences that ask 64 tokens each about one document."""
    segments = []
    for index in range(number):
        start = DOCUMENT + 100 * index
        past = [(0, DOCUMENT), (start, start + 64 - rows)]
        spans = [(0, DOCUMENT), (start, start + 64)]
        segments.append(Segment(index * rows, (index + 1) * rows, past, spans))
    return segments


def test_a_block_starts_at_its_position_in_the_sequence() -> None:
    spans = [(10, 10 + BLOCK_KEYS + 3), (500, 501)]
    table = table_of([Segment(0, 2, spans[:1], spans)])
    assert table.blocks.tolist() == [
        [10, 0, BLOCK_KEYS], [10 + BLOCK_KEYS, BLOCK_KEYS, 3], [500, BLOCK_KEYS + 3, 1]
    ]  # fmt: skip
    assert table.rows[:, :2].tolist() == [[0, BLOCK_KEYS + 2], [1, BLOCK_KEYS + 3]]
    assert table.own[:4, :4].tolist() == [[0, 2, 0, 1], [0, 2, 1, 1], [0, 2, 2, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("rows", [1, 8])
def test_six_questions_about_a_document_read_it_once(rows: int) -> None:
    alone = table_of(steps(DOCUMENT, rows=rows)).kv_bytes
    strangers = table_of(steps(*[DOCUMENT + 64] * 6, rows=rows)).kv_bytes
    together = table_of(questions(6, rows)).kv_bytes
    assert alone == DOCUMENT * 4096
    assert strangers == (DOCUMENT + 64) * 4096 * 6
    assert together == (DOCUMENT + 6 * 64) * 4096
    # Whole steps of 32 layers and 16 GB of weights: 24.6 and 6.7 ms at 4.8 TB/s.
    assert (16e9 + 32 * strangers) / 4.8e12 == pytest.approx(24.6e-3, rel=0.02)
    assert (16e9 + 32 * together) / 4.8e12 == pytest.approx(6.9e-3, rel=0.02)


def test_the_rows_of_a_document_lie_side_by_side_and_find_both_of_their_parts() -> None:
    stranger = Segment(12, 14, [(900_000, 900_010)], [(900_000, 900_012)])
    asked = questions(3, rows=4)
    table = table_of([asked[0], stranger, *asked[1:]])
    assert table.rows[:, 0].tolist() == [*range(12), 12, 13]
    first, rows, *_ = table.shared[0]
    assert (first, rows) == (0, 12)
    for listed, (_, position, own, num_own, shared, num_shared) in enumerate(table.rows):
        items = np.concatenate([table.own, table.shared])
        read = [one for one in items[own : own + num_own]] + [
            one for one in items[shared : shared + num_shared]
        ]
        assert all(one[0] <= listed < one[0] + one[1] for one in read)
        keys = sum(int(table.blocks[a : a + n, 2].sum()) for _, _, a, n, _ in read)
        assert keys >= position + 1
    parts = [range(part, part + rows) for _, rows, _, n, part in items if n]
    assert len({part for one in parts for part in one}) == sum(map(len, parts))
    assert max(one.stop for one in parts) <= table.sizes.num_parts


def test_a_long_sequence_among_short_ones_gets_its_share_of_programs() -> None:
    table = table_of(steps(131_072, *[5_120] * 5))
    blocks = table.own[:, 3]
    by_row = [int((table.own[blocks > 0, 0] == row).sum()) for row in range(6)]
    assert by_row[0] >= 0.8 * 131_072 / (131_072 + 5 * 5_120) * table.sizes.own_items
    assert sum(by_row) * KV_HEADS >= 0.9 * 4 * PROCESSORS
    longest = blocks.max()
    assert longest <= 1.25 * sum(blocks) / table.sizes.own_items  # nobody waits for one program


@pytest.mark.parametrize(("number", "rows"), [(1, 1), (1, 16), (6, 8), (32, 16)])
def test_the_parts_to_be_merged_stay_bounded(number: int, rows: int) -> None:
    for segments in (questions(number, rows), steps(*[40_000] * number, rows=rows)):
        table = table_of(segments)
        for items in (table.own, table.shared):
            assert items[:, 1].sum() <= max(number * rows, MAX_PARTS)
        assert table.sizes.num_parts <= 2 * max(number * rows, MAX_PARTS)


def test_blocks_outside_of_the_window_of_every_row_are_left_out() -> None:
    window, rows = 4096, 8
    table = table_of(questions(6, rows), window)
    read = table.kv_bytes / 4096 / 6
    assert window + rows - 1 <= read < window + rows + BLOCK_KEYS
    assert not table.shared.any()
    assert table.rows[0, 1] == DOCUMENT + 64 - rows  # positions stay those in the sequence


def test_a_short_sequence_within_the_window_is_read_whole() -> None:
    assert table_of(steps(100), window=4096).kv_bytes == table_of(steps(100)).kv_bytes


def test_rows_of_no_sequence_and_sequences_without_rows_have_no_items() -> None:
    table = table_of([*steps(200), Segment(1, 1, [], [])], extra_rows=2)
    assert sorted(table.rows[:, 0]) == [0, 1, 2]
    assert (table.rows[1:, 3] == 0).all()
    assert (table.own[:, 3] > 0).sum() == 4


def test_the_sections_of_a_shape_never_change_their_places() -> None:
    places = {
        (one.sizes, one.own.shape, one.shared.shape, one.rows.shape)
        for one in (table_of(questions(6, 8)), table_of(steps(*[900] * 6, rows=8)))
    }
    assert len(places) == 1


@pytest.mark.parametrize(
    ("head_dim", "itemsize", "shared_kib", "tiling"),
    [
        (64, 2, 99, (64, 128)),
        (128, 2, 163, (64, 128)),  # an A100
        (128, 2, 99, (64, 64)),  # an L4, an L40S, an RTX
        (256, 2, 227, (64, 64)),  # an H100 and later
        (256, 2, 163, (32, 64)),
        (256, 2, 99, (32, 32)),
        (128, 4, 99, (32, 32)),
        (256, 4, 99, (16, 16)),
    ],
)
def test_wide_heads_have_smaller_blocks_and_tiles_where_memory_is_small(
    head_dim: int, itemsize: int, shared_kib: int, tiling: tuple[int, int]
) -> None:
    assert tiling_of(head_dim, itemsize, shared_kib * 2**10) == tiling


def test_heads_that_are_few_here_because_ranks_share_them_get_more_items() -> None:
    for kv_heads in (8, 2, 1):
        table = table_of(steps(DOCUMENT), kv_heads=kv_heads)
        programs = int((table.own[:, 3] > 0).sum()) * kv_heads
        assert 0.9 * 4 * PROCESSORS <= programs <= 4 * PROCESSORS + kv_heads


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_tables_cut_from_what_sequences_keep_are_those_made_anew(data: st.DataObject) -> None:
    """While sequences of one document grow, are cut back, fork and are padded."""
    draw = data.draw
    document = draw(st.integers(1, 4))
    tables, pages = [], 10 * document
    for _ in range(draw(st.integers(1, 4))):
        runs = [PageRun(10 * i, 10 * i + 8) for i in range(document)]
        for _ in range(draw(st.integers(1, 5))):
            runs.append(PageRun(pages, pages + draw(st.integers(1, 6))))
            pages = runs[-1].stop + 1
        tables.append(PageTable(runs, PAGE))
    for _ in range(5):
        feeds = []
        for table in tables:
            num_rows = draw(st.integers(1, 16))
            position = draw(st.integers(0, table.num_tokens - num_rows))
            cut = draw(st.sampled_from([(0, 0), (0, 0), (position // 3, position // 2)]))
            feeds.append(Feed([0] * num_rows, position, table, 1, cut))
        rows = rows_of(feeds)
        if draw(st.booleans()):
            bucket = bucket_of(rows.segments)
            assert bucket is not None
            rows, _ = pad_rows(rows, bucket, first_slot=10**6)
        sizes = Sizes.of(len(rows.slots), len(rows.segments), KV_HEADS, PROCESSORS)
        window = draw(st.sampled_from([None, None, 100]))
        anew = [replace(one, paged=None) for one in rows.segments]
        expected = work_table(anew, sizes, window)
        assert np.array_equal(work_table(rows.segments, sizes, window), expected)


def test_a_step_of_many_runs_asks_no_run_for_its_blocks() -> None:
    """Of six sequences in 64 runs each, a step makes no array per run."""
    tables = [PageTable([PageRun(200 * b + 3 * i, 200 * b + 3 * i + 2) for i in range(64)], 256)
              for b in range(6)]  # fmt: skip
    calls = []
    with mock.patch.object(cache, "blocks_of", side_effect=cache.blocks_of) as made:
        for position in range(20_000, 20_003):
            rows = rows_of([Feed([0], position, table, 1) for table in tables])
            sizes = Sizes.of(len(rows.slots), len(rows.segments), KV_HEADS, PROCESSORS)
            work_table(rows.segments, sizes)
            calls.append(made.call_count)
    assert calls == [6, 6, 6]
