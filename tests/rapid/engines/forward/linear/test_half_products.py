"""Products with weights in float16, and the models of GGUF files that have them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch.nn.functional import linear

import rapid
from rapid.checkpoints.gguf import read_header, read_settings
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.forward.key_centres import key_centres
from rapid.engines.forward.linear import half_products
from rapid.engines.forward.linear.half_products import HalfLinear, HalfProduct, can_pack
from rapid.engines.forward.weights.gguf_weights import read_weights
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from tests.rapid import tiny_gguf
from tests.rapid.engines.forward.linear.test_products import check_fused_decoder, far_off
from tests.rapid.engines.forward.sharding.test_shards import steps
from tests.rapid.tiny_models import random_prompt

pytestmark = pytest.mark.skipif(not can_pack(), reason="needs FBGEMM, as torch has it for x86")

KINDS = [Kind.F16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0]


def config_of(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(path), device="cpu", max_context=512, kv_cache_tokens=1024, threads=1, **settings
    )


def unpacked(layer: HalfLinear) -> torch.Tensor:
    numbers: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(layer.product.packed)[0]
    return numbers[layer._own]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 16, 17, 200])
@pytest.mark.parametrize(("num_out", "num_in"), [(3, 5), (264, 64), (96, 576), (192, 100)])
def test_a_product_is_that_of_the_nearest_numbers(num_out: int, num_in: int, num_rows: int) -> None:
    torch.manual_seed(num_in)
    weight, bias = torch.randn(num_out, num_in) / 6, torch.randn(num_out)
    rows = torch.randn(2, num_rows, 2 * num_in)[..., ::2]
    for own in (None, bias):
        exact = linear(rows, weight.half().float(), own)
        assert torch.allclose(HalfProduct.of(weight, own)(rows), exact, atol=1e-5)


def test_in_a_tile_the_numbers_of_a_row_do_not_depend_on_the_others() -> None:
    product = HalfProduct.of(torch.randn(192, 576), None)
    rows = torch.randn(64, 576)
    for start in (0, 16, 48):
        tile, other = rows[start : start + 16], rows[:16].clone()
        other[5] = tile[5]
        assert torch.equal(product(other)[5], product(tile)[5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("without", ["nothing", "output.weight"])
def test_a_model_has_the_numbers_of_its_file(tmp_path: Path, kind: Kind, without: str) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", kind=kind, without=without)
    of_file = read_weights(read_header(str(path)), read_settings(str(path)), torch.float32)
    of_file.setdefault("lm_head.weight", of_file["model.embed_tokens.weight"])
    model = load_model(config_of(path)).model
    layers = {name: each for name, each in model.named_modules() if isinstance(each, HalfLinear)}
    assert len(layers) == 7 * tiny_gguf.LAYERS + 1
    assert not any(isinstance(each, torch.nn.Linear) for each in model.modules())
    for name, layer in layers.items():
        assert torch.equal(unpacked(layer), of_file[f"{name}.weight"].half().float())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
async def test_a_model_keeps_the_fused_decoder(tmp_path: Path, family: str) -> None:
    config = config_of(tiny_gguf.write(tmp_path / "m.gguf", family, Kind.Q4_1))
    loaded = load_model(config)
    has_biases = family == "qwen2"
    assert [centre is not None for centre in key_centres(loaded.model)] == [has_biases] * 2
    await check_fused_decoder(loaded, config)


def in_float32(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    with monkeypatch.context() as patch:
        patch.setattr("rapid.engines.forward.weights.loading.can_pack", lambda: False)
        return load_model(config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_with_these_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    config = config_of(tiny_gguf.write(tmp_path / "m.gguf", kind=kind))
    exact = in_float32(config, monkeypatch)
    linears = [each for each in exact.model.modules() if type(each) is torch.nn.Linear]
    assert len(linears) == 7 * tiny_gguf.LAYERS + 1
    for layer in linears:
        layer.weight.copy_(layer.weight.half())
    for own, expected in zip(steps(load_model(config), config), steps(exact, config), strict=True):
        if expected.numel():
            assert far_off(own, expected) < 1e-5


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_lossless_says_what_plain_says(tmp_path: Path, is_deterministic: bool) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", kind=Kind.Q4_1)
    model = load_model(config_of(path, deterministic=is_deterministic))
    long, short = (random_prompt(num_tokens, seed=3).tolist() for num_tokens in (60, 20))
    for sampling in (SamplingConfig(temperature=0), SamplingConfig(temperature=1, seed=7)):
        plain = rapid.generate(model, None, long, max_tokens=12, sampling=sampling)
        lossless = rapid.generate(
            model, model, long, short, max_tokens=12, sampling=sampling,
            speculation=SpeculationConfig(eta=0),
        )  # fmt: skip
        assert lossless.token_ids == plain.token_ids
        assert lossless.statistics.drafted > 0


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F32, "float32"), (Kind.Q4_1, "bfloat16")])
def test_other_numbers_stay_as_they_are(tmp_path: Path, kind: Kind, dtype: str) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", kind=kind)
    modules = list(load_model(config_of(path, dtype=dtype)).model.modules())
    assert not any(isinstance(each, HalfLinear) for each in modules)


def test_where_torch_has_no_such_products_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> HalfProduct:
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack_fp16")

    monkeypatch.setattr(HalfProduct, "of", refuse)
    with caplog.at_level(logging.INFO):
        assert not half_products.can_pack.__wrapped__()
    assert "weights stay in float32" in caplog.text
