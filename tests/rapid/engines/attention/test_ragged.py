"""Ragged attention over runs of pages against plain softmax attention, one sequence at a time."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rapid.engines.attention import cpu as cpu_attention
from rapid.engines.attention import kernel_inputs as rows_module
from rapid.engines.attention import ragged as attention
from rapid.engines.attention import shared_prefixes
from rapid.engines.attention.batch import Feed, assemble
from rapid.engines.attention.kernel_inputs import AttentionInputs
from rapid.engines.attention.ragged import (
    attend_by_runs,
    attend_ragged,
    blockwise_partial,
    merge,
    partial,
    plain_partial,
)
from rapid.engines.attention.segments import Partial
from rapid.engines.kv.cache import KVCache, KVLayout, PageRun, PageTable
from tests.rapid.engines.attention.small_cases import textbook

CPU = torch.device("cpu")
PAGE = 4
HEAD_DIM = 16
SCALE = HEAD_DIM**-0.5

# (past, new rows) of each sequence of a batch
BATCHES = {
    "decode": [(5, 1), (0, 1), (61, 1), (16, 1)],
    "decode, in one run each": [(5, 1), (0, 1), (11, 1)],
    "verify": [(33, 11), (7, 2), (60, 16), (1, 3)],
    "first chunks": [(0, 40), (0, 7)],
    "all kinds": [(50, 1), (12, 30), (0, 25), (41, 11), (3, 2), (64, 1)],
    "alone": [(37, 11)],
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def scattered(num_tokens: int, start: int) -> list[PageRun]:
    """Runs of 3, 1, 4, 1, 5 ... pages with a foreign page between them, in no order of slots."""
    runs, missing, length = [], -(-num_tokens // PAGE), 3
    while missing > 0:
        length = min(length, missing)
        runs.append(PageRun(start, start + length))
        start += length + 1
        missing -= length
        length = {3: 1, 1: 4, 4: 2, 2: 5}.get(length, 1)
    return runs[::-1]


def causal_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The textbook in float64: query [h, q, d] over keys [kv_heads, n, d], aligned at the end."""
    group = query.shape[0] // keys.shape[0]
    keys = keys.double().repeat_interleave(group, 0)
    values = values.double().repeat_interleave(group, 0)
    num_rows, num_keys = query.shape[1], keys.shape[1]
    scores = query.double() @ keys.transpose(1, 2) * SCALE
    hidden = torch.ones(num_rows, num_keys).triu(num_keys - num_rows + 1).bool()
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kernel", ["chosen", "split", "plain", "blockwise", "fp8"])
def test_every_row_equals_the_textbook(
    batch: str, group: int, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "split":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
        monkeypatch.setattr(cpu_attention, "MIN_SPLIT_KEYS", 5)
    elif kernel == "fp8":
        monkeypatch.setattr(rows_module, "numbers_at_once", lambda _: 5 * 2 * HEAD_DIM)
    elif kernel != "chosen":
        kernels = {"plain": plain_partial, "blockwise": blockwise_partial}
        monkeypatch.setattr(attention, "partial", kernels[kernel])
        monkeypatch.setattr(attention, "MAX_SCORES", 200)
    torch.manual_seed(group)
    kv_heads = 2
    layout = KVLayout(kv_heads, HEAD_DIM, dtype, (CPU,), is_fp8=kernel == "fp8")
    cache = KVCache(layout, num_pages=256, page_tokens=PAGE)
    for tensor in cache.layers[0]:
        tensor.fill_(float("nan"))  # slots nobody wrote must never be read
    feeds, histories, start = [], [], 0
    for past, new in BATCHES[batch]:
        runs = scattered(past + new, start)
        start = max(run.stop for run in runs) + 1
        table = PageTable(runs, PAGE)
        history = torch.randn(2, 1, kv_heads, past, HEAD_DIM).to(dtype)
        slots = [slot for span in table.spans(0, past) for slot in range(*span)]
        kept = cache.store(0, torch.tensor(slots, dtype=torch.long), *history)
        histories.append([each[0] for each in kept])
        feeds.append(Feed([0] * new, past, table, 0))
    rows = sum(new for _, new in BATCHES[batch])
    query = torch.randn(1, kv_heads * group, rows, HEAD_DIM).to(dtype)
    key = torch.randn(1, kv_heads, rows, HEAD_DIM).to(dtype)
    # as models pass it: heads and rows transposed
    value = torch.randn(1, rows, kv_heads, HEAD_DIM).to(dtype).transpose(1, 2)

    output, _ = attend_ragged(
        SimpleNamespace(layer_idx=0), query, key, value, None, SCALE,
        ragged=assemble(feeds, cache, CPU).rows,
    )  # fmt: skip

    assert output.shape == (1, rows, kv_heads * group, HEAD_DIM)
    first = 0
    for history, (_, new) in zip(histories, BATCHES[batch], strict=True):
        mine = slice(first, first + new)
        expected = causal_attention(
            query[0, :, mine],
            torch.cat([history[0], cache.as_read(key[0, :, mine])], 1),
            torch.cat([history[1], cache.as_read(value[0, :, mine])], 1),
        )
        got = output[0, mine].transpose(0, 1)
        torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=0)
        first += new


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("new", [(1, 1, 1, 1), (1, 11, 4, 1)])
def test_what_sequences_begin_with_together_is_read_once(
    new: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three questions about one document in two runs, and one about another."""
    monkeypatch.setattr(shared_prefixes, "MIN_SHARED_KEYS", 16)
    torch.manual_seed(0)
    cache = KVCache(KVLayout(2, HEAD_DIM, dtype, (CPU,)), num_pages=64, page_tokens=PAGE)
    keys, values = cache.layers[0]
    keys.normal_()
    values.normal_()
    document, other = [PageRun(3, 9), PageRun(12, 20)], [PageRun(30, 44)]
    tables = [
        PageTable([*document, PageRun(20, 26)], PAGE),
        PageTable([*other, PageRun(45, 50)], PAGE),
        PageTable([*document, PageRun(50, 56)], PAGE),
        PageTable([PageRun(3, 9), PageRun(12, 19), PageRun(57, 63)], PAGE),
    ]
    pasts = (59, 61, 70, 55)
    feeds = [
        Feed([0] * n, past, table, 0) for n, past, table in zip(new, pasts, tables, strict=True)
    ]
    rows = assemble(feeds, cache, CPU).rows
    (prefix,) = rows.prefixes()
    assert (prefix.spans, [*prefix.rests]) == ([(12, 36), (48, 76)], [0, 2, 3])
    tensors = [torch.randn(1, heads, sum(new), HEAD_DIM).to(dtype) for heads in (6, 2, 2)]
    num_read = 0

    def counting(query, key, *rest, **options):  # type: ignore[no-untyped-def]
        nonlocal num_read
        num_read += key.shape[2]
        return partial(query, key, *rest, **options)

    monkeypatch.setattr(attention, "partial", counting)
    output, _ = attend_ragged(SimpleNamespace(layer_idx=0), *tensors, None, SCALE, ragged=rows)
    read_together, num_read = num_read, 0
    inputs = AttentionInputs(*tensors, keys, values, rows, SCALE)
    apart = attend_by_runs(inputs, kernel=counting)
    assert num_read - read_together == 2 * 52
    torch.testing.assert_close(output, apart, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("batch", BATCHES)
def test_sinks_take_their_share_of_every_row(
    batch: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefixes, "MIN_SHARED_KEYS", 16)
    torch.manual_seed(0)
    cache = KVCache(KVLayout(2, HEAD_DIM, torch.float32, (CPU,)), num_pages=64, page_tokens=PAGE)
    for tensor in cache.layers[0]:
        tensor.normal_()
    table = PageTable([PageRun(0, 64)], PAGE)  # of all sequences, which share what they begin with
    feeds = [Feed([0] * new, past, table, 0) for past, new in BATCHES[batch]]
    rows = assemble(feeds, cache, CPU).rows
    query = torch.randn(1, 6, len(rows.slots), HEAD_DIM)
    key, value = (tensor[None, :, rows.slots] for tensor in cache.layers[0])
    sinks = torch.randn(6, dtype=torch.bfloat16)
    output, _ = attend_ragged(
        SimpleNamespace(layer_idx=0), query, key, value, None, SCALE,
        ragged=rows, sliding_window=window, s_aux=sinks,
    )  # fmt: skip
    inputs = AttentionInputs(
        query, key, value, *cache.layers[0], rows, SCALE, window, sinks.float()
    )
    torch.testing.assert_close(output, textbook(inputs), atol=2e-6, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 70])
def test_the_fused_kernel_follows_its_specification_on_strided_views(
    rows: int, is_causal: bool
) -> None:
    torch.manual_seed(rows)
    store = torch.randn(2, 3, 200, HEAD_DIM)
    num_keys = rows if is_causal else 90
    key = store[0][None, :, 7 : 7 + num_keys]
    value = store[1][None, :, 7 : 7 + num_keys]
    query = torch.randn(1, 3, rows, HEAD_DIM)
    output, lse = partial(query, key, value, SCALE, is_causal=is_causal)
    expected, expected_lse = plain_partial(query, key, value, SCALE, is_causal=is_causal)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_no_more_scores_than_the_limit_are_held_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, limit = 0, 2 * 3 * 8 * 8

    def counted(query: torch.Tensor, key: torch.Tensor, *args: object, **options: bool) -> Partial:
        nonlocal most
        most = max(most, query.shape[:-1].numel() * key.shape[2])
        return plain_partial(query, key, *args, **options)

    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 45, HEAD_DIM).to(dtype) for _ in range(3))
    expected, expected_lse = plain_partial(query, key, value, SCALE, is_causal=True)
    monkeypatch.setattr(attention, "MAX_SCORES", limit)
    monkeypatch.setattr(attention, "plain_partial", counted)
    output, lse = blockwise_partial(query, key, value, SCALE, is_causal=True)
    assert most == limit
    torch.testing.assert_close(output.to(dtype), expected, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=TOLERANCE[dtype], rtol=0)


def test_merging_any_split_of_the_keys_is_attention_over_all_of_them() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, HEAD_DIM) * 3 for n in (5, 64, 64))
    whole, _ = plain_partial(query, key, value, SCALE, is_causal=False)
    for cuts in ([0, 1, 64], [0, 20, 21, 50, 64], [0, 64]):
        parts = [
            plain_partial(query, key[:, :, a:b], value[:, :, a:b], SCALE, is_causal=False)
            for a, b in pairwise(cuts)
        ]
        torch.testing.assert_close(merge(parts)[0], whole, atol=2e-5, rtol=0)
