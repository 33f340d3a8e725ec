"""Checkpoints as they are published in four and eight bits: our decoder computes their numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rapid
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.engines.forward.layers.decoder import decoder_of
from rapid.engines.forward.linear.products import QuantizedLinear, check_stored
from rapid.engines.forward.sharding.shards import RankPart, Shard
from rapid.engines.forward.weights.loading import load_model
from rapid.engines.forward.weights.quantization import StoredWeights
from rapid.errors import ConfigurationError
from rapid.planning.packed_bits import StoredBits
from tests.rapid.engines.forward.linear.test_products import check_fused_decoder, far_off
from tests.rapid.engines.forward.sharding.test_shards import on_ranks, steps
from tests.rapid.tiny_models import random_prompt
from tests.rapid.tiny_stored import PUBLISHED, publish

CUDA = torch.device("cuda")
HEADS_OF_64 = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
SIZES: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": HEADS_OF_64,
    "gemma3_text": HEADS_OF_64,
    "phi3": {"hidden_size": 256, "intermediate_size": 384},
}


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The projections of the layers, and no other matrix."""
    layers = model.get_submodule("model").named_modules(prefix="model")
    return {name: layer for name, layer in layers if name.endswith("_proj")}


def test_of_a_checkpoint_that_reads_images_the_text_model_is_read(tmp_path: Path) -> None:
    config, plain = publish(tmp_path, "fp8", "gemma3_text", **SIZES["gemma3_text"])
    weights = {
        f"language_model.{name}": tensor
        for name, tensor in load_file(Path(config.model) / "model.safetensors").items()
    }
    weights["vision_tower.embeddings.weight"] = torch.ones(2, 2)
    save_file(weights, Path(config.model) / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((Path(config.model) / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text}
    whole["quantization_config"] = text.pop("quantization_config")
    (Path(config.model) / "config.json").write_text(json.dumps(whole))
    for own, expected in zip(
        steps(load_model(config), config), steps(load_model(plain), plain), strict=True
    ):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_product_is_with_the_numbers_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    """Exactly, with few rows and with many."""
    config, plain = publish(tmp_path, name)
    numbers = linears(load_model(plain).model)
    found = linears(load_model(config).model)
    assert len(found) == 14
    for module, layer in found.items():
        assert isinstance(layer, QuantizedLinear)
        weight = numbers[module].weight
        identity = torch.eye(weight.shape[1], dtype=torch.bfloat16)
        assert torch.equal(layer(identity), weight.t())
        assert torch.equal(layer(identity[100:103]), weight.t()[100:103])


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("name", ["awq", "fp8"])
async def test_a_published_model_keeps_the_fused_decoder(
    tmp_path: Path, name: str, family: str
) -> None:
    """It says what the plain model says; biases, which Qwen2 has, are added after a rounding."""
    config, plain = publish(tmp_path, name, family, **SIZES[family])
    loaded = load_model(config)
    for own, expected in zip(steps(loaded, config), steps(load_model(plain), plain), strict=True):
        if expected.numel():
            assert far_off(own, expected) < (0.15 if family == "qwen2" else 0.01)
    await check_fused_decoder(loaded, config)


WHOLES: list[tuple[str, str, dict[str, int]]] = [
    *((name, "qwen2", {}) for name in PUBLISHED),
    ("awq", "qwen2", {"num_key_value_heads": 1, "head_dim": 64}),  # that both ranks have
    *((name, "phi3", SIZES["phi3"]) for name in ("awq", "fp8")),
]


@pytest.mark.parametrize(("name", "family", "sizes"), WHOLES)
def test_parts_compute_together_what_the_whole_computes(
    tmp_path: Path, name: str, family: str, sizes: dict[str, int]
) -> None:
    """A part of the last projection has one and a half groups, packed as three."""
    config, _ = publish(tmp_path, name, family, **sizes)
    whole = steps(load_model(config), config)
    parts = [load_model(config, shard=Shard(rank, 2)) for rank in range(2)]

    def part(group: Any) -> list[torch.Tensor]:
        place = RankPart(Shard(group.rank, 2), group)
        return steps(replace(parts[group.rank], place=place), config)

    for own, others, expected in zip(*on_ranks(2, part), whole, strict=True):
        assert torch.equal(own, others)
        if expected.numel():
            # As far as those of the plain model: each part's sums are rounded to bfloat16.
            assert float((own - expected).norm() / expected.norm()) < 0.1


def test_no_weight_that_is_published_quantized_is_in_memory_as_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a layer is packed, it has one zero."""
    config, _ = publish(tmp_path, "gptq")
    pack, held = StoredWeights.pack, []

    def check(self: StoredWeights, model: torch.nn.Module, device: torch.device) -> None:
        held.extend(each.weight.untyped_storage().nbytes() for each in linears(model).values())
        pack(self, model, device)

    monkeypatch.setattr(StoredWeights, "pack", check)
    load_model(config)
    assert held == [2] * 14


def test_what_a_checkpoint_leaves_as_it_was_keeps_the_fused_decoder_too(tmp_path: Path) -> None:
    config, plain = publish(tmp_path, "awq", without="layers.0.mlp.down")
    loaded = load_model(config)
    kinds = [type(layer) for layer in linears(loaded.model).values()]
    assert (kinds.count(QuantizedLinear), kinds.count(torch.nn.Linear)) == (13, 1)
    assert decoder_of(loaded.model) is not None
    for own, exact in zip(steps(loaded, config), steps(load_model(plain), plain), strict=True):
        if exact.numel():
            assert far_off(own, exact) < 0.05


def test_lossless_says_what_plain_says(tmp_path: Path) -> None:
    config, _ = publish(tmp_path, "awq")
    target = load_model(config.model_copy(update={"deterministic": True}))
    long, short = (random_prompt(num_tokens, seed=3).tolist() for num_tokens in (120, 40))
    for sampling in (SamplingConfig(temperature=0), SamplingConfig(temperature=1, seed=7)):
        plain = rapid.generate(target, None, long, max_tokens=24, sampling=sampling)
        lossless = rapid.generate(
            target, target, long, short, max_tokens=24, sampling=sampling,
            speculation=SpeculationConfig(eta=0),
        )  # fmt: skip
        assert lossless.token_ids == plain.token_ids
        assert lossless.statistics.drafted > 0


def changed(path: str, **tensors: torch.Tensor) -> None:
    """Write other tensors into a checkpoint, by names with ``__`` for dots."""
    file = Path(path) / "model.safetensors"
    own = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(file) | own, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "tensors", "sentence"),
    [
        ("awq", {"lm_head__scales": torch.ones(1)}, "stores lm_head quantized"),
        ("fp8", {"lm_head__weight_scale": torch.ones(1)}, "stores lm_head quantized"),
        (
            "gptq v2",
            {"model__layers__0__mlp__up_proj__bias": torch.ones(384)},
            "has a bias of model.layers.0.mlp.up_proj",
        ),
        (
            "gptq",
            {"model__layers__1__mlp__up_proj__g_idx": torch.arange(128).flip(0) // 128 + 1},
            "model.layers.1.mlp.up_proj has other groups than .* or columns in the order of",
        ),
        (
            "awq",
            {"model__layers__1__mlp__up_proj__scales": torch.ones(2, 384)},
            "model.layers.1.mlp.up_proj has other groups",
        ),
        (
            "awq",
            {"model__layers__2__mlp__up_proj__scales": torch.ones(1)},
            "the file does not hold model.layers.2.mlp.up_proj.qweight",
        ),
        (
            "fp8",
            {
                "model__layers__2__mlp__up_proj__weight": torch.ones(64, 64),
                "model__layers__2__mlp__up_proj__weight_scale": torch.ones(64, 1),
            },
            "stores model.layers.2.mlp.up_proj, which its config.json does not have",
        ),
    ],
)
def test_what_a_file_holds_otherwise_is_refused(
    tmp_path: Path, name: str, tensors: dict[str, torch.Tensor], sentence: str
) -> None:
    config, _ = publish(tmp_path, name)
    changed(config.model, **tensors)
    with pytest.raises(ConfigurationError, match=sentence):
        load_model(config)


def test_a_published_checkpoint_has_its_devices_and_its_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = publish(tmp_path, "awq")
    with pytest.raises(ConfigurationError, match="compute in bfloat16: set dtype to bfloat16"):
        load_model(config.model_copy(update={"dtype": "float32"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_stored(StoredBits("awq", 4, 128), CUDA, torch.bfloat16)
    fp8 = StoredBits("compressed-tensors", 8, None)
    with pytest.raises(ConfigurationError, match=r"fp8 .* need a GPU of compute capability 9\.0"):
        check_stored(fp8, CUDA, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_stored(fp8, CUDA, torch.bfloat16)
