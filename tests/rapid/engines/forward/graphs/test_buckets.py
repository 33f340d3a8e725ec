"""Padding to a bucket: the rows of a step keep their keys, and nothing of the padding shows."""

from __future__ import annotations

import itertools

import pytest
import torch

from rapid.engines.attention.batch import Feed, RowLists, rows_of
from rapid.engines.attention.segments import MAX_STEP_ROWS, Segment
from rapid.engines.forward.graphs.buckets import (
    Bucket,
    bucket_of,
    common_buckets,
    example,
    pad_rows,
    padding_pages,
)
from rapid.engines.forward.graphs.cuda_graphs import MAX_SHAPES
from rapid.engines.forward.runner import Runner
from rapid.engines.kv.cache import KVCache, PageRun, PageTable
from tests.rapid.tiny_models import loaded, random_prompt

CPU = torch.device("cpu")
PAGES, PAGE_TOKENS = 32, 4
FIRST_SLOT = PAGES * PAGE_TOKENS
TABLES = [PageTable([PageRun(9, 12), PageRun(0, 8)], 4), PageTable([PageRun(20, 31)], 4)]


def segments(*lengths: int) -> list[Segment]:
    stops = list(itertools.accumulate(lengths))
    return [Segment(b - a, b, [], [(b - a, b)]) for a, b in zip(lengths, stops, strict=True)]


@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [
        ((1,), Bucket(1, 1, 1)),
        ((1, 1, 1, 1, 1), Bucket(6, 6, 1)),
        ((10,), Bucket(1, 16, 16)),
        ((1, 1, 1, 4), Bucket(4, 7, 4)),
        ((1, 1, 1, 10), Bucket(4, 19, 16)),  # a rectangle would have 64 rows
        ((10, 1, 9, 1, 1, 1), Bucket(6, 36, 16)),
        ((10,) * 6, Bucket(6, 66, 16)),
        ((16,) * 7, Bucket(8, 128, 16)),
    ],
)
def test_a_step_falls_into_the_smallest_bucket(lengths: tuple[int, ...], bucket: Bucket) -> None:
    assert bucket_of(segments(*lengths)) == bucket


@pytest.mark.parametrize(
    ("lengths", "bucket"),
    [
        ((1, 17), Bucket(2, 65, 64)),
        ((64, 1, 1, 1, 1), Bucket(6, 69, 64)),
        ((1, 40, 8), Bucket(3, 96, 64)),
        ((17,), None),  # without a decoding sequence
        ((1, 65), None),
        ((1, 17, 17), None),
    ],
)
def test_a_short_prefill_chunk_beside_others_has_buckets_of_its_own(
    lengths: tuple[int, ...], bucket: Bucket | None
) -> None:
    assert bucket_of(segments(*lengths)) == bucket


def test_common_buckets_are_those_of_plain_steps_and_of_whole_blocks() -> None:
    found = common_buckets(3)
    assert found == [
        *(Bucket(1, 1, 1), Bucket(1, 16, 16), Bucket(2, 2, 1)),
        *(Bucket(2, 32, 16), Bucket(3, 3, 1), Bucket(3, 48, 16)),
    ]
    assert len(common_buckets(1000)) < MAX_SHAPES / 2


def test_all_steps_of_six_sequences_have_a_graph() -> None:
    """Every step of up to six sequences fits its bucket, and the graphs suffice for all of them."""
    buckets: set[Bucket] = set()
    for count in range(1, 7):
        for lengths in itertools.combinations_with_replacement(range(1, 17), count):
            bucket = bucket_of(segments(*lengths))
            assert bucket is not None
            assert max(lengths) <= bucket.most_rows
            assert count <= bucket.sequences
            assert sum(lengths) + bucket.sequences - count <= bucket.rows
            buckets.add(bucket)
            if count < 6:
                with_chunk = bucket_of(segments(64, *lengths))
                assert with_chunk is not None
                assert 64 + sum(lengths) + with_chunk.sequences - count - 1 <= with_chunk.rows
                buckets.add(with_chunk)
    assert len(buckets) <= MAX_SHAPES


def test_an_example_fills_its_bucket() -> None:
    for bucket in (Bucket(1, 1, 1), Bucket(6, 36, 16), Bucket(4, 7, 4), Bucket(3, 96, 64)):
        made = example(bucket, FIRST_SLOT)
        lengths = [segment.stop - segment.start for segment in made.segments]
        assert len(lengths) == bucket.sequences
        assert sum(lengths) == len(made.input_ids) == len(made.slots) == bucket.rows
        assert max(lengths) == bucket.most_rows
        assert min(made.slots) >= FIRST_SLOT


def step() -> RowLists:
    prompts = [random_prompt(40, seed).tolist() for seed in (1, 2)]
    return rows_of(
        [Feed(prompts[0][20:21], 20, TABLES[0], 1), Feed(prompts[1][20:25], 20, TABLES[1], 3)]
    )


def test_padding_leaves_the_rows_and_their_keys_as_they_are() -> None:
    rows, bucket = step(), Bucket(3, 33, 16)
    made, wanted = pad_rows(rows, bucket, FIRST_SLOT)
    assert len(made.input_ids) == len(made.positions) == len(made.slots) == bucket.rows
    assert len(made.segments) == bucket.sequences
    assert made.wanted == list(range(bucket.rows))
    assert [made.slots[row] for row in wanted] == [rows.slots[row] for row in rows.wanted]
    for own, with_more in zip(rows.segments, made.segments, strict=False):
        num_rows = own.stop - own.start
        moved = slice(with_more.start, with_more.start + num_rows)
        assert made.input_ids[moved] == rows.input_ids[own.start : own.stop]
        assert made.positions[moved] == rows.positions[own.start : own.stop]
        assert with_more.past == own.past
        assert with_more.all_spans[: len(own.all_spans)] == own.all_spans
        for start, stop in with_more.all_spans[len(own.all_spans) :]:
            assert start == FIRST_SLOT
            assert stop - start == with_more.stop - with_more.start - num_rows <= MAX_STEP_ROWS


def test_what_padding_holds_changes_no_bit() -> None:
    """The rows of a padded step are those of the step, whatever the slots of padding held.

    A product of more rows adds in another order, so the step alone differs in the last digits.
    """
    cache = KVCache(loaded().kv_layout, PAGES + padding_pages(PAGE_TOKENS), PAGE_TOKENS)
    runner = Runner(loaded().model, cache, CPU, loaded().vocab_size)
    for tensor in itertools.chain(*cache.layers):
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    rows = step()
    made, wanted = pad_rows(rows, Bucket(3, 33, 16), FIRST_SLOT)
    found = []
    with torch.inference_mode():
        alone = runner._forward(rows.batch(rows.pack(), cache, None))
        for garbage, token in ((0.0, 0), (1e4, 7)):
            for tensor in itertools.chain(*cache.layers):
                tensor[:, FIRST_SLOT:] = garbage
            is_padding = [slot >= FIRST_SLOT for slot in made.slots]
            pairs = zip(made.input_ids, is_padding, strict=True)
            ids = [token if is_one else own for own, is_one in pairs]
            made.input_ids[:] = ids
            found.append(runner._forward(made.batch(made.pack(), cache, None))[wanted])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], alone, atol=1e-5, rtol=1e-5)
