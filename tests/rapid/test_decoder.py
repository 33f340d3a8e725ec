"""Our forward of a model's layers against transformers' own."""

from __future__ import annotations

import pytest
import torch

from rapid.engines.batching import Feed, assemble
from rapid.engines.decoder import decoder_of
from rapid.engines.kv_cache import KVCache, KVLayout, PageTable, Run
from rapid.engines.loading import load_model
from tests.rapid.tiny_models import engine_config, loaded, random_prompt

CPU = torch.device("cpu")
FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")


def model_of(family: str, dtype: str = "float32") -> torch.nn.Module:
    """With biases and norms that change something."""
    model = load_model(engine_config(family, dtype=dtype)).model
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_it_computes_what_transformers_computes_bit_for_bit(family: str, dtype: str) -> None:
    model = model_of(family, dtype)
    decoder = decoder_of(model)
    assert decoder is not None
    layout = loaded(family).kv_layout
    layout = KVLayout(layout.num_kv_heads, layout.head_dim, getattr(torch, dtype), (CPU, CPU))
    caches = KVCache(layout, 16, page_tokens=4), KVCache(layout, 16, page_tokens=4)
    prompt = random_prompt(30).tolist()
    first, second = PageTable([Run(0, 8)], 4), PageTable([Run(8, 16)], 4)
    steps = [
        [Feed(prompt[:20], 0, first, num_wanted=0), Feed(prompt[:9], 0, second, num_wanted=1)],
        [Feed(prompt[20:24], 20, first, num_wanted=4), Feed(prompt[9:10], 9, second, num_wanted=1)],
        [Feed(prompt[24:25], 24, first, num_wanted=1)],
    ]
    for feeds in steps:
        ours, theirs = (assemble(feeds, cache, CPU) for cache in caches)
        with torch.inference_mode():
            got = decoder(ours.input_ids, ours.position_ids, ours.rows)
            want = model.get_submodule("model")(
                input_ids=theirs.input_ids,
                position_ids=theirs.position_ids,
                use_cache=False,
                ragged=theirs.rows,
            ).last_hidden_state
        assert torch.equal(got, want)
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(ours[0][:, :25], theirs[0][:, :25])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_fused_weights_are_the_models_own_memory(family: str) -> None:
    model = load_model(engine_config(family)).model
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(held.values()) == sum(parameter.nbytes for parameter in model.parameters())
    layers = list(model.get_submodule("model.layers").children())
    before = [layer.get_submodule(name).weight.data_ptr() for layer in layers for name in FUSED]
    assert decoder_of(model) is not None
    after = [layer.get_submodule(name).weight.data_ptr() for layer in layers for name in FUSED]
    assert before == after, "a second decoder copied the weights again"


def test_a_projection_that_is_more_than_a_product_is_left_to_transformers() -> None:
    class Quantized(torch.nn.Linear):
        pass

    model = load_model(engine_config()).model
    assert decoder_of(model) is not None
    layer = model.get_submodule("model.layers.1.mlp")
    layer.up_proj = Quantized(32, 64, bias=False)
    assert decoder_of(model) is None
