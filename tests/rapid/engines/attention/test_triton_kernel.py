"""The split-KV kernel in Triton's interpreter against the textbook; on CUDA see `make test-gpu`.

The interpreter multiplies the bits of bfloat16 as integers, so half precision is tested in float16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rapid.engines.attention.ragged import attend_by_runs, plain_partial
from rapid.engines.attention.rows import AttentionInputs, RaggedRows
from rapid.engines.attention.segments import Segment
from rapid.engines.attention.triton_kernel import BLOCK_KEYS, HEADER, attend_to_table, key_table
from rapid.engines.kv.cache import KVCache, KVLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch_of(
    sequences: list[tuple[list[int], int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> AttentionInputs:
    """Random rows over random keys of sequences given as (lengths of their runs, new rows)."""
    segments: list[Segment] = []
    first, slot = 0, 3
    for lengths, rows in sequences:
        spans = []
        for length in lengths:
            spans.append((slot, slot + length))
            slot += length + 2  # slots of nobody between runs
        spans.reverse()
        *others, (start, stop) = spans
        past = [*others, (start, stop - rows)] if stop - rows > start else others
        segments.append(Segment(first, first + rows, past, spans))
        first += rows
    layout = KVLayout(kv_heads, head_dim, dtype, (DEVICE,))
    cache = KVCache(layout, num_pages=slot + BLOCK_KEYS, page_tokens=1)
    for tensor in cache.layers[0]:
        tensor.fill_(float("nan"))  # slots nobody wrote must never count
        for segment in segments:
            for start, stop in segment.all_spans:
                tensor[:, start:stop].normal_()
    query = 3 * torch.randn(1, first, kv_heads * group, head_dim, device=DEVICE).transpose(1, 2)
    slots = [place for s in segments for place in range(s.all_spans[-1][1] - (s.stop - s.start),
                                                        s.all_spans[-1][1])]  # fmt: skip
    rows = RaggedRows(cache, segments, torch.tensor(slots, device=DEVICE))
    keys, values = cache.layers[0]
    own = keys[None, :, rows.slots], values[None, :, rows.slots]
    return AttentionInputs(query.to(dtype), *own, keys, values, rows, head_dim**-0.5)


def attend(inputs: AttentionInputs, splits: int) -> torch.Tensor:
    table = torch.from_numpy(key_table(inputs.rows.segments)).to(DEVICE)
    return attend_to_table(inputs, table, splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("sequences", "kv_heads", "group", "head_dim"),
    [
        ([([5], 1), ([130], 1), ([20, 64, 1], 1)], 2, 4, 16),
        ([([70, 9], 8), ([16], 16), ([150], 2), ([3], 1)], 2, 2, 16),
        ([([66], 3)], 1, 7, 24),  # neither the group nor the head is a power of 2
    ],
    ids=["decode", "verify", "odd"],
)
def test_steps_equal_the_textbook_however_they_are_split(
    sequences: list[tuple[list[int], int]], kv_heads: int, group: int, head_dim: int, splits: int
) -> None:
    torch.manual_seed(splits)
    inputs = batch_of(sequences, kv_heads, group, head_dim)
    expected = attend_by_runs(inputs, kernel=plain_partial)
    torch.testing.assert_close(attend(inputs, splits), expected, atol=2e-5, rtol=0)


def test_half_precision_is_rounded_once() -> None:
    torch.manual_seed(0)
    inputs = batch_of([([90, 9], 3), ([40], 1)], 2, 2, 16, torch.float16)
    names = ("query", "key", "value", "keys", "values")
    exact = replace(inputs, **{name: getattr(inputs, name).float() for name in names})
    expected = attend_by_runs(exact, kernel=plain_partial)
    got = attend(inputs, splits=2)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.float(), expected, atol=2e-3, rtol=0)


def test_a_table_walks_every_span_in_blocks() -> None:
    segments = [
        Segment(0, 2, [], [(10, 10 + BLOCK_KEYS + 3), (500, 501)]),
        Segment(2, 3, [], [(7, 8)]),
    ]
    table = key_table(segments, num_blocks=4)
    assert table[0, :HEADER].tolist() == [0, 2, 3]
    assert table[0, HEADER : HEADER + 3].tolist() == [10, 10 + BLOCK_KEYS, 500]
    assert table[0, HEADER + 4 :].tolist() == [0, BLOCK_KEYS, BLOCK_KEYS + 3, BLOCK_KEYS + 4, 0]
    assert table[1, :HEADER].tolist() == [2, 1, 1]
    with pytest.raises(ValueError, match="3 blocks of keys, room for 2"):
        key_table(segments, num_blocks=2)
