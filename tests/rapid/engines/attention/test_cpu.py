"""Every form of attention on a CPU against its specification, and when each is taken."""

from __future__ import annotations

import pytest
import torch

from rapid.engines.attention import cpu as cpu_attention
from rapid.engines.attention.cpu import Form, attend_packed, form_for, row_by_row, split
from rapid.engines.attention.ragged import plain_partial

SCALE = 0.125
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> int:
    """As a machine with more threads than KV heads, and not a multiple of them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    return 4


def rows_and_keys(
    heads: int, rows: int, num_keys: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, and views of a cache whose other slots nobody may read."""
    torch.manual_seed(num_keys + rows)
    cache = torch.full((2, heads, num_keys + 19, 64), float("nan"))
    cache[:, :, 7 : 7 + num_keys] = torch.randn(2, heads, num_keys, 64)
    key, value = (tensor[None, :, 7 : 7 + num_keys] for tensor in cache.to(dtype))
    # as models pass it: heads and rows transposed
    query = torch.randn(1, rows, heads, 64).to(dtype).transpose(1, 2)
    return query, key, value


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 40])
@pytest.mark.parametrize("num_keys", [5, 515, 2048])
@pytest.mark.parametrize("form", [attend_packed, row_by_row, split])
def test_every_form_follows_the_specification(
    form: Form, num_keys: int, rows: int, heads: int, dtype: torch.dtype
) -> None:
    query, key, value = rows_and_keys(heads, rows, num_keys, dtype)
    output, lse = form(query, key, value, SCALE)
    expected, expected_lse = plain_partial(
        query.float(), key.float(), value.float(), SCALE, is_causal=False
    )
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=TOLERANCE[dtype], rtol=0)


def test_no_form_copies_keys(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    query, key, value = rows_and_keys(1, 2, 515, torch.bfloat16)
    store = key.untyped_storage().data_ptr()
    seen: list[int] = []
    packed = attend_packed

    def watched(query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor | float) -> object:
        assert key.untyped_storage().data_ptr() == store
        seen.append(len(key))
        return packed(query, key, *rest)

    monkeypatch.setattr(cpu_attention, "attend_packed", watched)
    for form in (cpu_attention.attend_packed, row_by_row, split):
        form(query, key, value, SCALE)
    assert seen == [1, 1, threads, 1]  # the split's last call is for the keys left over


@pytest.mark.usefixtures("threads")
def test_each_form_is_taken_where_it_was_measured_to_pay() -> None:
    def chosen(heads: int, rows: int, num_keys: int, dtype: torch.dtype) -> Form:
        shape = (1, heads, 1, 64)
        query = torch.empty(1, dtype=dtype).expand(*shape[:2], rows, 64)
        return form_for(query, torch.empty(1, dtype=dtype).expand(*shape[:2], num_keys, 64))

    single, half = torch.float32, torch.bfloat16
    assert chosen(8, 2, 16384, half) is row_by_row
    assert chosen(8, 2, 16384, single) is attend_packed
    assert chosen(8, 3, 16384, half) is attend_packed
    assert chosen(8, 2, 65536, half) is attend_packed  # the second row would read memory again
    assert chosen(1, 8, 65536, single) is split
    assert chosen(4, 8, 65536, single) is attend_packed  # a head for every thread
    assert chosen(1, 8, 1000, single) is attend_packed  # not worth the merging
    assert chosen(1, 64, 65536, single) is attend_packed  # blocks of rows keep the threads busy
