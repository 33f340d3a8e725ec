"""Sliding windows over ragged rows, against plain softmax attention with a mask."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rapid.engines.attention import shared_prefixes, windows
from rapid.engines.attention.batch import Feed, assemble
from rapid.engines.attention.kernel_inputs import AttentionInputs, Kernels
from rapid.engines.attention.ragged import attend_by_runs, attend_ragged, plain_partial
from rapid.engines.attention.segments import Segment
from rapid.engines.attention.windows import within
from rapid.engines.kv.cache import KVCache, KVLayout, PageTable
from tests.rapid.engines.attention.test_ragged import BATCHES, HEAD_DIM, PAGE, SCALE, scattered

CPU = torch.device("cpu")
HEADS, KV_HEADS = 4, 2


def textbook(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
) -> torch.Tensor:
    """In float64: query [h, q, d] over keys [kv_heads, n, d], aligned at the end."""
    keys = keys.double().repeat_interleave(HEADS // KV_HEADS, 0)
    values = values.double().repeat_interleave(HEADS // KV_HEADS, 0)
    num_rows, num_keys = query.shape[1], keys.shape[1]
    own = torch.arange(num_keys - num_rows, num_keys)[:, None]
    others = torch.arange(num_keys)
    hidden = (others > own) | (others <= own - window)
    scores = query.double() @ keys.transpose(1, 2) * SCALE
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values


@pytest.mark.parametrize("window", [1, 2, 5, 16, 40, 64, 1000])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kernel", ["chosen", "an engine's"])
def test_every_row_sees_the_last_keys_up_to_itself(
    batch: str, window: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots outside of the sequences hold no numbers, and pieces are shorter than some chunks."""
    monkeypatch.setattr(windows, "MAX_PIECE_ROWS", 12)
    monkeypatch.setattr(shared_prefixes, "MIN_SHARED_KEYS", 4)
    torch.manual_seed(0)
    cache = KVCache(KVLayout(KV_HEADS, HEAD_DIM, torch.float32, (CPU,)), 400, PAGE)
    keys, values = cache.layers[0]
    keys.fill_(float("nan"))
    values.fill_(float("nan"))
    tables, start = [], 0
    for past, rows in BATCHES[batch]:
        tables.append(PageTable(scattered(past + rows, start), PAGE))
        start += 50
    all_keys, feeds = [], []
    for (past, rows), table in zip(BATCHES[batch], tables, strict=True):
        own = torch.randn(2, KV_HEADS, past + rows, HEAD_DIM)
        slots = torch.tensor([s for span in table.spans(0, past) for s in range(*span)]).long()
        keys[:, slots], values[:, slots] = own[0, :, :past], own[1, :, :past]
        all_keys.append(own)
        feeds.append(Feed([0] * rows, past, table, num_wanted=0))

    def attend(inputs: AttentionInputs) -> torch.Tensor:
        return attend_by_runs(inputs, kernel=plain_partial)

    kernels = Kernels(attend, attend) if kernel != "chosen" else None
    rows = assemble(feeds, cache, CPU, kernels).rows
    new = torch.cat(
        [own[:, :, past:] for own, (past, _) in zip(all_keys, BATCHES[batch], strict=True)], 2
    )
    query = torch.randn(1, HEADS, new.shape[2], HEAD_DIM)
    got, _ = attend_ragged(
        SimpleNamespace(layer_idx=0), query, new[:1], new[1:], None, SCALE,
        ragged=rows, sliding_window=window,
    )  # fmt: skip
    first = 0
    for own, (_, num_rows) in zip(all_keys, BATCHES[batch], strict=True):
        mine = query[0, :, first : first + num_rows]
        want = textbook(mine, own[0], own[1], window).transpose(0, 1)
        found = got[0, first : first + num_rows].double()
        torch.testing.assert_close(found, want, atol=3e-6, rtol=0)
        first += num_rows


def test_keys_before_the_window_are_not_read_and_only_first_rows_have_an_edge() -> None:
    segment = Segment(0, 3, [(100, 140)], [(100, 140), (8, 11)])
    (piece,) = within([segment], window=10)
    assert (piece.start, piece.stop) == (0, 3)
    assert piece.edge == [(131, 133)]
    assert piece.past == [(133, 140)]
    assert piece.all_spans == [(133, 140), (8, 11)]
    assert within([segment], window=43) == [segment]


def test_a_long_chunk_falls_into_pieces_whose_past_is_the_chunk_itself() -> None:
    segment = Segment(5, 25, [], [(40, 60)])
    first, second, third = within([segment], window=8)
    assert [(first.start, first.stop), (third.start, third.stop)] == [(5, 13), (21, 25)]
    assert (first.past, first.edge) == ([], [])
    assert (second.past, second.edge) == ([], [(41, 48)])
    assert (third.past, third.edge) == ([(52, 56)], [(49, 52)])
