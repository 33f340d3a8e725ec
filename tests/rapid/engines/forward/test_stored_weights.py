"""Checkpoints as they are published in four and eight bits: our decoder computes their numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rapid
from rapid.config import EngineConfig, SamplingConfig, SpeculationConfig
from rapid.engines.forward.loading import load_model
from rapid.engines.forward.products import QuantizedLinear, check_stored
from rapid.engines.forward.shards import RankPart, Shard
from rapid.errors import ConfigurationError
from rapid.planning.packed_bits import StoredBits
from tests.rapid.engines.forward.test_products import check_fused_decoder, far_off
from tests.rapid.engines.forward.test_shards import on_ranks, steps
from tests.rapid.tiny_models import copied, engine_config, random_prompt
from tests.rapid.tiny_stored import PUBLISHED, WIDE, publish

CUDA = torch.device("cuda")


def check_near(own: list[torch.Tensor], others: list[torch.Tensor], most: float) -> None:
    for logits, expected in zip(own, others, strict=True):
        assert logits.shape == expected.shape
        if expected.numel():
            assert far_off(logits, expected) < most


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("name", PUBLISHED)
async def test_a_published_checkpoint_computes_with_its_numbers(
    tmp_path: Path, name: str, family: str
) -> None:
    """Exactly: what is left is the order of sums in float32."""
    config, plain = publish(tmp_path, name, family)
    loaded = load_model(config)
    layers = list(loaded.model.get_submodule("model").modules())
    linears = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    assert len(linears) == 14
    assert not any(type(layer) is torch.nn.Linear for layer in layers)
    own = steps(loaded, config)
    check_near(own, steps(load_model(plain), plain), 1e-4)
    await check_fused_decoder(loaded, config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16", "fp8"])
def test_in_other_dtypes_it_is_as_near_as_the_plain_one(
    tmp_path: Path, name: str, dtype: str
) -> None:
    config, plain = publish(tmp_path, name)
    exact = steps(load_model(plain), plain)
    config, rounded = (each.model_copy(update={"dtype": dtype}) for each in (config, plain))
    most = max(
        far_off(each, expected)
        for each, expected in zip(steps(load_model(rounded), rounded), exact, strict=True)
        if expected.numel()
    )
    check_near(steps(load_model(config), config), exact, 1.5 * most)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parts_compute_together_what_the_whole_computes(tmp_path: Path, name: str) -> None:
    """A part of the last projection has one and a half groups."""
    config, _ = publish(tmp_path, name, "qwen2")
    whole = steps(load_model(config), config)
    parts = [load_model(config, shard=Shard(rank, 2)) for rank in range(2)]

    def part(group: Any) -> list[torch.Tensor]:
        place = RankPart(Shard(group.rank, 2), group)
        return steps(replace(parts[group.rank], place=place), config)

    for of_rank in on_ranks(2, part):
        check_near(of_rank, whole, 1e-4)
