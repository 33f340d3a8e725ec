"""Keys with a large bias keep their differences in fp8, because what they share is taken off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typing_extensions import override

from rapid.engines.attention.batch import Feed
from rapid.engines.forward.key_centres import key_centres
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.engines.kv.cache import KVCache, PageRun, PageTable
from tests.rapid.tiny_families import family_checkpoint, family_model
from tests.rapid.tiny_models import engine_config, loaded, random_prompt

CPU = torch.device("cpu")
PROMPT = random_prompt(120, seed=5).tolist()
SLOWEST = [6, 7, 14, 15]  # dimensions of a head of 16 that rotate least
SLOW = {"rope_type": "linear", "factor": 64.0}  # as slow as those of large models


def with_biases(size: float) -> LoadedModel:
    """A tiny Qwen2 with biases of keys, as large ones have them, where keys rotate least."""
    model = load_model(engine_config("qwen2", rope_scaling=SLOW))
    for layer in model.model.get_submodule("model.layers").children():
        bias = layer.get_submodule("self_attn.k_proj").bias
        assert isinstance(bias, torch.Tensor)
        bias.data.view(-1, 16)[:, SLOWEST] = size * torch.tensor([1.0, -0.7, 0.8, 1.2])
    return model


class Shifted(KVCache):
    """A cache of float32 that takes the centres off."""

    @override
    def store(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        centre = self.centres[layer]
        assert centre is not None
        return super().store(layer, slots, key - centre[:, None], value)


def log_probs(model: LoadedModel, cache: KVCache) -> torch.Tensor:
    """Those of the last half of the prompt, which is read in two chunks."""
    runner, table = (
        Runner(model.model, cache, CPU, model.vocab_size),
        PageTable([PageRun(0, 20)], 8),
    )
    runner.run([Feed(PROMPT[:50], 0, table, 1)])
    (found,) = runner.run([Feed(PROMPT[50:], 50, table, 60)])
    return found.log_softmax(-1)


def in_fp8(model: LoadedModel, centres: list[torch.Tensor | None]) -> torch.Tensor:
    cache = KVCache(replace(model.kv_layout, is_fp8=True), 20, 8, centres)
    return log_probs(model, cache)


def test_a_vector_off_all_keys_changes_no_attention() -> None:
    model = with_biases(5.0)
    centres = key_centres(model.model)
    expected = log_probs(model, KVCache(model.kv_layout, 20, 8))
    shifted = log_probs(model, Shifted(model.kv_layout, 20, 8, centres))
    torch.testing.assert_close(shifted, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("size", [20.0, 200.0])
def test_keys_with_a_large_bias_keep_their_differences(size: float) -> None:
    model = with_biases(size)
    expected = log_probs(model, KVCache(model.kv_layout, 20, 8))

    def lost(centres: list[torch.Tensor | None]) -> float:
        """The mean divergence from the model with KV in float32."""
        return float((expected.exp() * (expected - in_fp8(model, centres))).sum(-1).mean())

    assert lost(key_centres(model.model)) < 0.2 * lost([])


def test_keys_without_a_bias_have_no_centre() -> None:
    assert key_centres(loaded("llama").model) == [None, None]
    assert key_centres(loaded("qwen3").model) == [None, None]


def test_keys_beside_sinks_are_kept_as_they_are() -> None:
    """A vector off all keys would change what the sinks take, which are no scores of keys."""
    model = family_model(family_checkpoint("gpt_oss"))
    assert key_centres(model.model) == [None] * 3
    expected = log_probs(model, KVCache(model.kv_layout, 20, 8))
    centres = [torch.ones(2, 16)] * 3
    shifted = log_probs(model, Shifted(model.kv_layout, 20, 8, centres))
    assert float((shifted - expected).abs().max()) > 0.1


def test_a_part_of_the_heads_has_its_part_of_the_centres() -> None:
    """So ranks that share the heads need not tell each other."""
    model = with_biases(5.0).model
    (of_one_head, _) = key_centres(model)
    projection = model.get_submodule("model.layers.0.self_attn.k_proj")
    assert isinstance(projection.bias, torch.Tensor)
    projection.bias = torch.nn.Parameter(torch.cat((torch.randn(16), projection.bias.data)))
    (of_two_heads, _) = key_centres(model)
    assert of_one_head is not None
    assert of_two_heads is not None
    assert torch.equal(of_two_heads[1:], of_one_head)
