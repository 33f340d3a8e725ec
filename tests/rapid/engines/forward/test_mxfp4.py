"""Experts in MXFP4, as gpt-oss publishes them: read as the numbers that transformers makes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rapid.checkpoints.facts import read_model_facts
from rapid.checkpoints.memory import memory_needs
from rapid.config import EngineConfig
from rapid.engines.forward.sharding.shards import RankPart, Shard
from rapid.engines.forward.weights.loading import load_model
from rapid.errors import ConfigurationError
from tests.rapid.engines.forward.sharding.test_shards import on_ranks, steps
from tests.rapid.tiny_families import family_checkpoint, family_config, reference_of

SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A checkpoint of two files, of which the second has the scales of the first's blocks."""
    path = tmp_path_factory.mktemp("published") / "gpt-oss"
    shutil.copytree(family_checkpoint("gpt_oss"), path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    generator = torch.Generator().manual_seed(0)
    scales = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, num_in, num_out = tensors.pop(name).shape
        shape = experts, num_out, num_in // 32

        def draw(least: int, most: int, *shape: int) -> torch.Tensor:
            return torch.randint(least, most, shape, generator=generator).to(torch.uint8)

        tensors[f"{name}_blocks"] = draw(0, 256, *shape, 16)
        scales[f"{name}_scales"] = draw(121, 126, *shape)
    places: dict[str, str] = {}
    for file, own in {"a.safetensors": tensors, "b.safetensors": scales}.items():
        save_file(own, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": SETTINGS}))
    return family_config(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_the_numbers_that_transformers_makes(
    published: EngineConfig, dtype: str
) -> None:
    stored = load_file(Path(published.model) / "a.safetensors")
    stored |= load_file(Path(published.model) / "b.safetensors")
    found = load_model(published.model_copy(update={"dtype": dtype})).model.state_dict()
    blocks = [name for name in stored if name.endswith("_blocks")]
    assert len(blocks) == 6
    for name in blocks:
        base = name.removesuffix("_blocks")
        packed = stored[name], stored[f"{base}_scales"]
        exact = convert_moe_packed_tensors(*packed, dtype=getattr(torch, dtype))
        assert torch.equal(found[base], exact)


def test_the_model_is_the_one_that_transformers_loads(published: EngineConfig) -> None:
    loaded = load_model(published)
    (got, *_) = steps(loaded, published)
    with torch.no_grad():
        ids = torch.arange(7, 47)[None]
        want = reference_of(Path(published.model))(ids, use_cache=False).logits[0]
    torch.testing.assert_close(got, want[:, : loaded.vocab_size], atol=5e-5, rtol=0)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_parts_of_groups_and_of_experts(
    published: EngineConfig, size: int
) -> None:
    """Of four ranks each has half a group of the columns of the last projection."""
    whole = steps(load_model(published), published)
    shards = [Shard(rank, size) for rank in range(size)]
    parts = [load_model(published, shard=shard) for shard in shards]

    def part(group: Any) -> list[torch.Tensor]:
        place = RankPart(shards[group.rank], group)
        return steps(replace(parts[group.rank], place=place), published)

    for of_rank in on_ranks(size, part):
        for logits, expected in zip(of_rank, whole, strict=True):
            torch.testing.assert_close(logits, expected, atol=3e-5, rtol=0)


def test_memory_is_planned_for_the_numbers(published: EngineConfig) -> None:
    facts = read_model_facts(published)
    need, _ = memory_needs(published, facts, on_gpu=False, with_pools=False)
    model = load_model(published).model
    assert need.weights == sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"quantization": {"quant_method": "mxfp4"}}, "is stored quantized: leave quantization"),
        ({"device": "balanced"}, "is stored quantized .mxfp4., which is not for layers that"),
    ],
)
def test_what_is_not_built_is_refused_in_a_sentence(
    published: EngineConfig, setting: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        load_model(published.model_copy(update=setting))
