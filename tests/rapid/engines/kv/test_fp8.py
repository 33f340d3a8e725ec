"""Numbers in fp8: what is kept of them, and that every reader gets the same back."""

from __future__ import annotations

import pytest
import torch

from rapid.engines.kv.cache import KVCache, KVLayout
from rapid.engines.kv.fp8 import FP8, LARGEST, check_device, from_fp8, to_fp8
from rapid.errors import ConfigurationError

CPU = torch.device("cpu")
ALL = torch.arange(256, dtype=torch.uint8).view(FP8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_fp8_is_read_as_it_is_in_any_dtype(dtype: torch.dtype) -> None:
    numbers = ALL[~ALL.float().isnan()]
    assert len(numbers) == 254
    read = from_fp8(numbers, dtype)
    assert read.dtype == dtype
    assert torch.equal(read.double(), numbers.double())
    assert torch.equal(to_fp8(read).view(torch.uint8), numbers.view(torch.uint8))


def test_a_sixteenth_of_a_number_is_lost_at_most() -> None:
    numbers = torch.logspace(-6, 8.8, 4001, base=2.0)
    numbers = torch.cat((numbers, -numbers))
    lost = (from_fp8(to_fp8(numbers), torch.float32) - numbers).abs() / numbers.abs()
    assert lost.max() <= 1 / 16
    small = torch.linspace(-(2**-6), 2**-6, 1001)
    assert (from_fp8(to_fp8(small), torch.float32) - small).abs().max() <= 2**-10


def test_what_is_too_large_is_kept_as_the_largest() -> None:
    numbers = torch.tensor([449.0, 1e6, -1e30, float("inf")])
    read = from_fp8(to_fp8(numbers), torch.float32)
    assert read.tolist() == [LARGEST, LARGEST, -LARGEST, LARGEST]


def test_rows_read_of_themselves_what_later_rows_read_of_them() -> None:
    torch.manual_seed(0)
    layout = KVLayout(2, 4, torch.bfloat16, (CPU,) * 2, is_fp8=True)
    centre = torch.randn(2, 4).bfloat16()
    cache = KVCache(layout, 4, 4, [None, centre])
    slots = torch.tensor([7, 3, 12])
    key, value = (torch.randn(1, 3, 2, 4).bfloat16().transpose(1, 2) for _ in range(2))
    for layer, shifted in ((0, key), (1, key - centre[:, None])):
        read = cache.store(layer, slots, key, value)
        for one, kept, computed in zip(read, cache.layers[layer], (shifted, value), strict=True):
            assert one.dtype == torch.bfloat16
            assert torch.equal(from_fp8(kept[:, slots], torch.bfloat16), one[0])
            assert torch.equal(one, cache.as_read(computed))


def test_a_token_takes_a_byte_a_number_in_both_tiers() -> None:
    layout = KVLayout(2, 4, torch.float32, (CPU,) * 3, is_fp8=True)
    assert layout.bytes_per_token == 2 * 3 * 2 * 4
    cache = KVCache(layout, 2, 4)
    assert sum(stack.nbytes for stack in cache.stacks) == 2 * 4 * layout.bytes_per_token


def test_a_gpu_that_does_not_convert_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ConfigurationError, match=r"needs a GPU of compute capability 8\.9"):
        check_device(torch.device("cuda"))
    check_device(CPU)
