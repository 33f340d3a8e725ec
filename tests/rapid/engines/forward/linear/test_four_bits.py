"""Weights in four bits: what they stand for, their packed products, and the models that have them.

The specification is the product with `numbers_of`, the weights that codes and scales stand for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

import rapid
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.forward.linear import four_bits
from rapid.engines.forward.linear.four_bits import (
    MOST_PACKED_ROWS,
    codes_of,
    numbers_of,
    pack_weight,
    product,
    scales_of,
    unpack_parts,
)
from rapid.engines.forward.linear.products import QuantizedLinear, check_method
from rapid.engines.forward.opening import page_context
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.errors import ConfigurationError
from rapid.planning.packed_bits import CONVERTED
from tests.rapid.engines.forward.linear.test_products import check_fused_decoder, far_off
from tests.rapid.engines.forward.sharding.test_shards import headed, steps
from tests.rapid.tiny_models import copied, engine_config, random_prompt

SHAPES = [(64, 64), (128, 576), (320, 512), (192, 384)]
WIDE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
CUDA = torch.device("cuda")
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def weights(num_out: int, num_in: int) -> torch.Tensor:
    """Random weights, of which some groups are zero, skewed, or hundreds of times as large."""
    torch.manual_seed(num_in)
    weight = torch.randn(num_out, num_in) / 6
    weight[5] = 0
    weight[6] += 1
    weight[7, :64] *= 300
    return weight.bfloat16()


@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_a_weight_becomes_the_nearest_of_the_sixteen_numbers_of_its_group(
    num_out: int, num_in: int
) -> None:
    weight = weights(num_out, num_in)
    codes, scales = codes_of(weight)
    numbers = numbers_of(codes, scales)
    assert int(codes.max()) == 15
    assert not numbers[5].any()
    step = scales[..., 0].float().t().repeat_interleave(num_in // len(scales), dim=1)
    off = (numbers - weight.float()).abs()
    rounding = (weight.float().abs() + 8 * step) / 256  # of scale and middle to bfloat16
    assert bool((off <= step / 2 + rounding).all())
    for moved in (-1, 1):
        others = numbers_of((codes.int() + moved).clamp(0, 15), scales)
        assert bool((off <= (others - weight.float()).abs() + 1e-7).all())


def test_a_large_weight_costs_its_group_alone_its_precision() -> None:
    weight = weights(64, 384)
    numbers = numbers_of(*codes_of(weight))
    assert far_off(numbers[7:8, 128:], weight[7:8, 128:].float()) < 0.12
    assert far_off(numbers[7:8, 64:128], weight[7:8, 64:128].float()) > 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_a_packed_product_is_that_of_the_numbers(num_out: int, num_in: int, device: str) -> None:
    """To what rounding the result leaves; a GPU, and all with many rows, round the numbers too."""
    weight = weights(num_out, num_in).to(device)
    numbers, (own, scales) = numbers_of(*codes_of(weight)), pack_weight(weight)
    assert own.untyped_storage().nbytes() == num_out * num_in / 2
    most = MOST_PACKED_ROWS[device]
    for num_rows in (1, 3, 16, most, most + 1, 2 * most):
        rows = torch.randn(num_rows, num_in, device=device).bfloat16()
        is_rounded = device == "cuda" or num_rows > most
        exact = linear(rows.float(), numbers.bfloat16().float() if is_rounded else numbers)
        assert far_off(product(rows, own, scales), exact) < 0.004


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [1, 2**26])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_packed_weights_are_converted_to_their_numbers(
    monkeypatch: pytest.MonkeyPatch, num_out: int, num_in: int, at_once: int, device: str
) -> None:
    """Whole, or in parts of 64 rows or more."""
    monkeypatch.setitem(CONVERTED, device, at_once)
    weight = weights(num_out, num_in).to(device)
    parts = list(unpack_parts(*pack_weight(weight), num_in))
    assert all(part.numel() <= max(at_once, 64 * num_in) for part in parts)
    assert len(parts) == 1 if at_once == 2**26 else len(parts) == -(-num_out // 64)
    numbers = numbers_of(*codes_of(weight)).bfloat16()
    if device == "cpu":
        assert torch.equal(torch.cat(parts, dim=1).t(), numbers)
    assert far_off(torch.cat(parts, dim=1).t()[6:], numbers[6:].float()) < 0.005


def test_the_numbers_of_a_row_do_not_depend_on_the_others() -> None:
    """So that what is computed in tiles is computed to the same bits."""
    own, scales = pack_weight(weights(320, 512))
    rows = torch.randn(MOST_PACKED_ROWS["cpu"], 512).bfloat16()
    together = product(rows, own, scales)
    for first, last in ((0, 1), (0, 3), (5, 21), (17, 64)):
        assert torch.equal(product(rows[first:last], own, scales), together[first:last])


def test_published_scales_are_rounded_to_bfloat16_alone() -> None:
    """By a share of 2 ** -9 of a number, and of what lies between the middle and zero."""
    torch.manual_seed(0)
    scale, zero = torch.rand(3, 64) / 100, torch.randint(0, 17, (3, 64))
    codes = torch.randint(0, 16, (64, 3 * 128), dtype=torch.uint8)
    wide = [each.t().repeat_interleave(128, dim=1) for each in (scale, zero)]
    exact = (codes - wide[1].float()) * wide[0]
    off = (numbers_of(codes, scales_of(scale, zero)) - exact).abs()
    assert bool((off <= (exact.abs() + (8 - wide[1]).abs() * wide[0]) * 1.01 / 2**8).all())
    assert far_off(numbers_of(codes, scales_of(scale, zero)), exact) < 0.004


def test_blocks_of_rows_are_packed_apart_as_together() -> None:
    weight = weights(320, 512)
    whole, scales = pack_weight(weight)
    parts, of_parts = zip(*map(pack_weight, weight.split((64, 192, 64))), strict=True)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.cat(of_parts, dim=1), scales)


class TestOnAGPU:
    """Torch's operators for CUDA, replaced by ones of the shapes and of the tiles they document."""

    @pytest.fixture(autouse=True)
    def operators(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def pack(pairs: torch.Tensor, num_tiles: int) -> torch.Tensor:
            codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(1)
            num_out, num_in = codes.shape
            width = 16 * num_tiles
            tiles = codes.view(num_out // 8, 8, num_in // width, width).transpose(1, 2)
            digits = tiles.reshape(num_out // 8, num_in // width, 32, num_tiles // 2, 8)
            return (digits.long() << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)

        def multiply(
            rows: torch.Tensor, weight: torch.Tensor, group: int, scales: torch.Tensor
        ) -> torch.Tensor:
            assert rows.is_contiguous()
            assert scales.is_contiguous()
            assert scales.shape == (rows.shape[1] // group, 8 * len(weight), 2)
            assert group in (32, 64, 128, 256)
            assert len(weight) <= 65_535
            tiles = (weight[..., None] >> torch.arange(0, 32, 4)) & 15
            width = 8 * weight.shape[3] * 4
            codes = tiles.reshape(len(weight), -1, 8, width).transpose(1, 2)
            return linear(rows, numbers_of(codes.reshape(8 * len(weight), -1), scales).bfloat16())

        monkeypatch.setattr(four_bits, "_is_on_cpu", lambda _: False)
        monkeypatch.setattr(torch, "_convert_weight_to_int4pack", pack)
        monkeypatch.setattr(torch, "_weight_int4pack_mm", multiply)

    @pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
    def test_few_and_many_rows_are_multiplied_with_the_same_numbers(
        self, monkeypatch: pytest.MonkeyPatch, num_out: int, num_in: int
    ) -> None:
        weight = weights(num_out, num_in)
        numbers, (own, scales) = numbers_of(*codes_of(weight)).bfloat16(), pack_weight(weight)
        assert own.shape[0] == num_out // 8
        rows = torch.randn(70, num_in).bfloat16()
        for at_once in (1, 2**26):
            monkeypatch.setitem(CONVERTED, "cpu", at_once)
            assert torch.equal(torch.cat(list(unpack_parts(own, scales, num_in)), 1).t(), numbers)
            assert far_off(product(rows, own, scales), linear(rows.float(), numbers.float())) < 0.01


def test_torch_packs_for_a_gpu_blocks_of_eight_rows_in_tiles_of_a_group() -> None:
    """By what it says of tensors without numbers."""
    for num_in, shape in ((576, (24, 9, 32, 2)), (512, (24, 4, 32, 4))):
        own, scales = pack_weight(torch.empty(192, num_in, dtype=torch.bfloat16, device="meta"))
        assert own.shape == shape
        assert scales.shape == (shape[1], 192, 2)


@pytest.mark.parametrize(
    ("num_out", "num_in", "most_tiles"),
    [
        (8192, 8192, 65_024),  # Llama 70B's output of attention: 2**26 weights are 65,536 tiles
        (57_344, 8192, 65_024),
        (28_672, 4096, 65_280),
        (59_136, 8192, 65_024),
        (8192, 8256, 65_016),  # in groups of 64, of which there are twice as many
    ],
)
def test_no_more_tiles_pass_for_blocks_than_a_grid_of_cuda_has(
    monkeypatch: pytest.MonkeyPatch, num_out: int, num_in: int, most_tiles: int
) -> None:
    """By the shapes that torch's operator for CUDA is given, without numbers."""
    given = []

    def noted(rows: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        given.append(len(weight))
        return rows.new_empty(len(rows), 8 * len(weight))

    monkeypatch.setattr(torch, "_weight_int4pack_mm", noted)
    monkeypatch.setitem(CONVERTED, "meta", CONVERTED["cuda"])
    own, scales = pack_weight(torch.empty(num_out, num_in, dtype=torch.bfloat16, device="meta"))
    parts = list(unpack_parts(own, scales, num_in))
    assert sum(part.shape[1] for part in parts) == num_out
    assert sum(given) == num_out // 8 * len(scales)
    assert max(given) == most_tiles


def int4(config: EngineConfig) -> EngineConfig:
    return config.model_copy(update={"quantization": "int4", "dtype": "bfloat16"})


def with_numbers(config: EngineConfig) -> LoadedModel:
    """The model in float32, its weights replaced by the numbers that they are quantized to."""
    loaded = load_model(config.model_copy(update={"dtype": "float32"}))
    for layer in loaded.model.get_submodule("model").modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data.copy_(numbers_of(*codes_of(layer.weight.bfloat16())))
    return loaded


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
async def test_a_model_keeps_the_fused_decoder(tmp_path: Path, family: str) -> None:
    config = int4(headed(tmp_path, family, **WIDE))
    loaded = load_model(config)
    layers = list(loaded.model.get_submodule("model").modules())
    linears = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    assert len(linears) == 14
    assert not any(type(layer) is torch.nn.Linear for layer in layers)
    storages = {layer.weight.untyped_storage().data_ptr() for layer in linears}
    assert len(storages) == 2 * 4  # queries, keys and values in one; gate and up in one
    await check_fused_decoder(loaded, config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_model_computes_with_the_numbers_of_its_weights(role: str, device: str) -> None:
    """The model with its own weights is further away than the rounding of activations."""
    config = engine_config().model_copy(update={"model": f"embedded:{role}"})
    exact, plain = with_numbers(config), load_model(config)
    rounded = load_model(int4(config).model_copy(update={"device": device}))
    for own, expected, unquantized in zip(
        steps(rounded, config), steps(exact, config), steps(plain, config), strict=True
    ):
        if expected.numel():
            assert far_off(own.cpu(), expected) < far_off(unquantized, expected) / 6
            assert far_off(unquantized, expected) > 0.05


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_lossless_says_what_plain_says(role: str) -> None:
    """Of a target in four bits, and of a target in bfloat16 with a drafter in four bits."""
    common: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True, "max_context": 1024}
    target, drafter = (
        load_model(
            EngineConfig(
                model=f"embedded:{name}", quantization="int4" if name == role else None, **common
            )
        )
        for name in ("target", "drafter")
    )
    long, short = (random_prompt(num_tokens, seed=3).tolist() for num_tokens in (200, 60))
    for sampling in (SamplingConfig(temperature=0), SamplingConfig(temperature=1, seed=7)):
        plain = rapid.generate(target, None, long, max_tokens=24, sampling=sampling)
        lossless = rapid.generate(
            target, drafter, long, short, max_tokens=24, sampling=sampling,
            speculation=SpeculationConfig(eta=0),
        )  # fmt: skip
        assert lossless.token_ids == plain.token_ids
        assert lossless.statistics.drafted > 0


def test_kept_pages_of_other_weights_are_not_found(tmp_path: Path) -> None:
    config = EngineConfig(
        model="embedded:target", device="cpu", dtype="bfloat16", host_cache_tokens=64,
        disk_cache_folder=str(tmp_path), disk_cache_gib=1,
    )  # fmt: skip
    kinds = [config.model_copy(update={"quantization": kind}) for kind in (None, "int8", "int4")]
    assert len({page_context(load_model(kind), kind) for kind in kinds}) == 3


def test_what_cannot_be_packed_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has 32 columns, and quantization: int4 packs 64"):
        load_model(int4(engine_config()))
    path = copied(tmp_path, hidden_size=128, intermediate_size=192, num_key_value_heads=4)
    config = int4(engine_config()).model_copy(update={"model": str(path), "tensor_parallel": 2})
    with pytest.raises(ConfigurationError, match="has 32 rows of queries of each process"):
        load_model(config)


def test_it_has_its_devices_and_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="int4 computes in bfloat16"):
        check_method("int4", torch.device("cpu"), torch.float32)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigurationError, match=r"int4 needs a GPU of compute capability 8\.0"):
        check_method("int4", CUDA, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_method("int4", CUDA, torch.bfloat16)
