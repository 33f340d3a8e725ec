"""Weights in eight bits: their products, and the models that have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid.config import EngineConfig
from rapid.engines.engine import Engine
from rapid.engines.forward.layers.decoder import decoder_of
from rapid.engines.forward.linear.products import (
    MOST_READ_ROWS,
    Method,
    Product,
    QuantizedLinear,
    _multiply_scaled,
    check_method,
    product_of_numbers,
    quantize_weight,
)
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.errors import ConfigurationError
from tests.rapid.tiny_models import copied, engine_config, lease_request

METHODS: tuple[Method, ...] = ("int8", "fp8")
CUDA = torch.device("cuda")


def weights_and_rows(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_rows)
    weight, rows = torch.randn(48, 32) / 6, torch.randn(num_rows, 32)
    weight[5] = 0
    weight[6] *= 100
    return weight.bfloat16(), rows.bfloat16()


@pytest.mark.parametrize("width", [8, 24, 30, 33, 1000])
def test_widths_that_the_kernel_of_int8_cannot_read_are_right_as_well(width: int) -> None:
    """It reads beyond the end of the only row."""
    for seed in range(5):
        torch.manual_seed(seed)
        weight, scale = quantize_weight(torch.randn(40, width).bfloat16(), "int8")
        row = torch.randn(1, width).bfloat16()
        exact = row.float() @ (weight.float() * scale.float()[:, None]).T
        assert far_off(Product(weight, scale)(row), exact) < 0.02


def far_off(product: torch.Tensor, exact: torch.Tensor) -> float:
    """By how much a product is off, as a share of its row's size."""
    return float(((product.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@pytest.mark.parametrize("num_rows", [1, 3, MOST_READ_ROWS, MOST_READ_ROWS + 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_product_is_that_of_the_numbers_with_their_scales(method: Method, num_rows: int) -> None:
    weight, rows = weights_and_rows(num_rows)
    numbers, scale = quantize_weight(weight, method)
    bias = torch.randn(48).bfloat16()
    exact = (rows.float() @ numbers.float().T) * scale.float()
    got = Product(numbers, scale, bias)(rows[None])[0]
    assert far_off(got, exact + bias.float()) < 0.01  # a few roundings to 8 bits
    assert far_off(product_of_numbers(rows, numbers, scale), exact) < 0.01


@pytest.mark.parametrize(("method", "most"), [("int8", 0.01), ("fp8", 0.05)])
def test_each_row_of_the_weights_has_its_own_scale(method: Method, most: float) -> None:
    weight, _ = weights_and_rows(1)
    numbers, scale = quantize_weight(weight, method)
    back = numbers.float() * scale.float()[:, None]
    assert not back[5].any()
    rows = [row for row in range(48) if row != 5]
    assert far_off(back[rows], weight.float()[rows]) < most


def test_the_scaled_product_of_a_gpu_quantizes_every_row_by_itself() -> None:
    weight, rows = weights_and_rows(4)
    rows[2] *= 1000
    numbers, scale = quantize_weight(weight, "fp8")
    got = _multiply_scaled(rows, numbers, scale)
    assert far_off(got, (rows.float() @ numbers.float().T) * scale) < 0.05
    assert torch.equal(got[2:3], _multiply_scaled(rows[2:3], numbers, scale))


async def check_fused_decoder(loaded: LoadedModel, config: EngineConfig) -> None:
    """Check that our decoder answers as transformers' forward of the same products does."""

    async def answer() -> tuple[int, ...]:
        engine = Engine(loaded, config)
        try:
            await engine.open(lease_request())
            await engine.prefill("a")
            return (await engine.decode("a", 0, 16)).token_ids
        finally:
            engine.close()

    assert decoder_of(loaded.model) is not None
    fused = await answer()
    loaded.model.config.quantization_config = {}  # transformers' forward of the same products
    assert decoder_of(loaded.model) is None
    assert await answer() == fused


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("method", METHODS)
async def test_a_quantized_model_keeps_the_fused_decoder(method: Method, family: str) -> None:
    config = engine_config(family, dtype="bfloat16", quantization=method)
    loaded = load_model(config)
    layers = list(loaded.model.get_submodule("model").modules())
    linears = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    assert len(linears) == 14
    assert not any(type(layer) is torch.nn.Linear for layer in layers)
    assert all(layer.weight.element_size() == 1 for layer in linears)
    assert decoder_of(loaded.model) is not None

    await check_fused_decoder(loaded, config)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quantization": "int8"}, "int8 computes in bfloat16: set dtype to bfloat16"),
        ({"quantization": "fp8", "dtype": "float16"}, "fp8 computes in bfloat16"),
    ],
)
def test_other_dtypes_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        load_model(engine_config(**settings))


def test_a_checkpoint_that_is_stored_quantized_is_refused(tmp_path: Any) -> None:
    path = copied(tmp_path, quantization_config={"quant_method": "fp8"})
    config = engine_config(dtype="bfloat16", quantization="int8").model_copy(
        update={"model": str(path)}
    )
    with pytest.raises(ConfigurationError, match="is stored quantized: leave quantization out"):
        load_model(config)


def test_each_kind_has_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="int8 is for a CPU: set quantization to fp8"):
        check_method("int8", CUDA, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigurationError, match=r"fp8 needs a GPU of compute capability 9\.0"):
        check_method("fp8", CUDA, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_method("fp8", CUDA, torch.bfloat16)


def test_layers_that_accelerate_places_are_refused() -> None:
    with pytest.raises(ValueError, match="not for layers that accelerate places"):
        EngineConfig(model="embedded:target", device="balanced", quantization="fp8")
