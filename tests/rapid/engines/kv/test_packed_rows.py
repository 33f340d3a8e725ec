"""Keys and values in fewer bits: how far they are from what they were, and what they take."""

from __future__ import annotations

import pytest
import torch

from rapid.engines.kv.packed_rows import pack_rows, unpack_rows

SHAPE = (3, 2, 2, 64, 16)  # layers, keys and values, heads, tokens, head_dim


def draw_rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows with one channel of keys that is large everywhere, as those of models have."""
    rows = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    rows[:, 0, :, :, 5] += 40.0
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_packed_is_the_same(dtype: torch.dtype) -> None:
    rows = draw_rows(dtype)
    assert torch.equal(unpack_rows(pack_rows(rows, None), None), rows)


@pytest.mark.parametrize("bits", [8, 4])
def test_each_number_is_at_most_half_a_step_off(bits: int) -> None:
    rows = draw_rows(torch.float32)
    found = unpack_rows(pack_rows(rows, bits), bits)
    for part, dim in ((0, 2), (1, 3)):
        values, near = rows[:, part], found[:, part]
        least, most = values.aminmax(dim=dim, keepdim=True)
        assert ((values - near).abs() <= 0.501 * (most - least) / (2**bits - 1)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_one_large_channel_does_not_make_the_others_coarse(bits: int) -> None:
    rows = draw_rows(torch.bfloat16)
    found = unpack_rows(pack_rows(rows, bits), bits)
    assert found.dtype == torch.bfloat16
    off = (rows.float() - found.float()).abs()[:, 0]
    assert off[..., [i for i in range(16) if i != 5]].mean() < {8: 0.01, 4: 0.1}[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_equal_numbers_stay_what_they_are(bits: int) -> None:
    rows = torch.full(SHAPE, -2.5)
    assert torch.equal(unpack_rows(pack_rows(rows, bits), bits), rows)


def test_they_take_a_half_and_a_quarter_and_their_groups() -> None:
    rows = draw_rows(torch.bfloat16)
    sizes = {bits: sum(part.nbytes for part in pack_rows(rows, bits)) for bits in (8, 4)}
    groups = 2 * 2 * (rows[:, :1, :, :1].numel() + rows[:, 1:, ..., :1].numel())  # in bfloat16
    assert sizes == {8: rows.nbytes // 2 + groups, 4: rows.nbytes // 4 + groups}
