"""Parts of a model on threads of this process: their sums are the whole model's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from rapid.config import EngineConfig
from rapid.engines.attention.batch import Feed
from rapid.engines.forward.opening import open_runner
from rapid.engines.forward.sharding.shards import RankPart, Shard, fingerprint
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.engines.kv.cache import PageRun, PageTable
from rapid.errors import ConfigurationError
from tests.rapid.tiny_models import FAMILIES, VOCAB, checkpoint, copied, engine_config

PAGES = PageTable([PageRun(2, 12), PageRun(20, 30)], 8)
OTHER_PAGES = PageTable([PageRun(40, 60)], 8)


class ThreadGroup:
    """A `Group` whose ranks are threads of this process."""

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._shared, self._barrier = shared, barrier

    def _exchanged(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._shared[self.rank] = tensor.clone()
        self._barrier.wait()
        found = list(self._shared)
        self._barrier.wait()
        return found

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(sum(self._exchanged(tensor)))

    def gather(self, columns: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchanged(columns), dim=1)

    def all(self, claim: bool) -> bool:
        return all(self._exchanged(torch.tensor(claim)))


def on_ranks(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work` returns on each rank, given its group."""
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    groups = [ThreadGroup(rank, size, shared, barrier) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, groups))


def headed(tmp_path: Path, family: str, **settings: object) -> EngineConfig:
    """A checkpoint of four KV heads whose biases are not zero."""
    config_class, model_class, _ = FAMILIES[family]
    torch.manual_seed(1)
    sizes: dict[str, object] = {
        "vocab_size": VOCAB + 7,  # not divisible
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    config = config_class(**sizes | settings)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint() / name).read_bytes())
    return engine_config().model_copy(update={"model": str(tmp_path)})


def steps(loaded: LoadedModel, config: EngineConfig) -> list[torch.Tensor]:
    """The logits of a ragged prefill, then of blocks of three rows and of one."""
    runner, _ = open_runner(loaded, config, loaded.vocab_size)
    ids = torch.arange(7, 60).tolist()
    first = runner.run([Feed(ids[:40], 0, PAGES, 40), Feed(ids[5:20], 0, OTHER_PAGES, 0)])
    more = runner.run([Feed(ids[40:43], 40, PAGES, 3), Feed([9], 15, OTHER_PAGES, 1)])
    return [*first, *more]


CASES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_parts_compute_together_what_the_whole_computes(
    tmp_path: Path, family: str, settings: dict[str, object], size: int
) -> None:
    config = headed(tmp_path, family, **settings)
    whole = steps(load_model(config), config)

    shards = [Shard(rank, size) for rank in range(size)]
    parts = [load_model(config, shard=shard) for shard in shards]
    assert {part.kv_layout.num_kv_heads for part in parts} == {max(4 // size, 1)}

    def part(group: Any) -> list[torch.Tensor]:
        place = RankPart(shards[group.rank], group)
        return steps(replace(parts[group.rank], place=place), config)

    for of_rank in on_ranks(size, part):
        for logits, expected in zip(of_rank, whole, strict=True):
            assert logits.shape == expected.shape
            assert torch.allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize(("method", "most"), [("int8", 0.03), ("fp8", 0.1), ("int4", 0.02)])
def test_quantized_parts_compute_together_what_the_whole_computes(
    tmp_path: Path, method: str, most: float
) -> None:
    """A part has scales of its own for its columns, so that the numbers are not the whole's.

    Those of four bits are: here the parts' columns are whole groups.
    """
    wide = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 32} if method == "int4" else {}
    config = headed(tmp_path, "qwen2", **wide).model_copy(
        update={"quantization": method, "dtype": "bfloat16"}
    )
    whole = steps(load_model(config), config)
    parts = [load_model(config, shard=Shard(rank, 2)) for rank in range(2)]

    def part(group: Any) -> list[torch.Tensor]:
        place = RankPart(Shard(group.rank, 2), group)
        return steps(replace(parts[group.rank], place=place), config)

    of_ranks = on_ranks(2, part)
    for own, others, expected in zip(*of_ranks, whole, strict=True):
        assert torch.equal(own, others)
        if expected.numel():
            assert (own - expected).norm() / expected.norm() < most


def test_a_part_holds_its_share_of_the_weights(tmp_path: Path) -> None:
    config = headed(tmp_path, "llama")
    sizes = [
        sum(p.numel() for p in load_model(config, shard=shard).model.parameters())
        for shard in (None, Shard(0, 4), Shard(3, 4))
    ]
    norms = 5 * 32
    padding = 1 * 32 * 2  # a row of the table and of the output matrix
    assert sizes[1] == sizes[2]
    assert 4 * (sizes[1] - norms) == sizes[0] - norms + padding


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_key_value_heads": 4, "num_attention_heads": 6}, "6 attention heads"),
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, "3 key and value heads"),
        ({"num_key_value_heads": 4, "intermediate_size": 62}, "62 columns of the MLP"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, changes: dict[str, int], what: str
) -> None:
    path = copied(tmp_path, **changes)
    with pytest.raises(ConfigurationError, match=f"{what}, which tensor_parallel: 4 does not"):
        load_model(EngineConfig(model=str(path), tensor_parallel=4))


def test_a_model_that_is_more_than_products_is_not_split(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, mlp_bias=True, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((checkpoint() / name).read_bytes())
    with pytest.raises(ConfigurationError, match="cannot be split over processes"):
        load_model(EngineConfig(model=str(tmp_path)), shard=Shard(0, 2))


def test_other_files_have_another_fingerprint(tmp_path: Path) -> None:
    same = fingerprint(str(checkpoint()))
    assert same == fingerprint(str(checkpoint()))
    assert same != fingerprint(str(copied(tmp_path, rope_theta=20000.0)))


def test_two_trainings_of_one_model_have_two_fingerprints(tmp_path: Path) -> None:
    """Names, shapes and sizes are the same, and all weights but those of one matrix."""
    same = fingerprint(str(checkpoint()))
    path = copied(tmp_path) / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.v_proj.weight"
    for changed in (name, "model.norm.weight"):
        save_file(weights | {changed: weights[changed] + 1.0}, path, metadata={"format": "pt"})
        assert path.stat().st_size == (checkpoint() / path.name).stat().st_size
        assert fingerprint(str(path.parent)) != same
    save_file(weights, path, metadata={"format": "pt"})
    assert fingerprint(str(path.parent)) == same
