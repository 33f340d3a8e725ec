"""Our forward of a model's layers against transformers' own."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from rapid.engines.attention import ragged as attention
from rapid.engines.attention.batch import Feed, assemble
from rapid.engines.forward.layers.decoder import decoder_of
from rapid.engines.forward.runner import Runner
from rapid.engines.forward.weights.loading import load_model
from rapid.engines.kv.cache import KVCache, KVLayout, PageRun, PageTable
from tests.rapid.tiny_models import engine_config, loaded, random_prompt

CPU = torch.device("cpu")
FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def model_of(kind: str, dtype: str = "float32") -> torch.nn.Module:
    """With biases and norms that change something; yarn scales its angles' cosines and sines."""
    if kind == "llama with biases":
        config = copy.deepcopy(loaded("llama").model.config)
        config.attention_bias = True
        model = LlamaForCausalLM._from_config(
            config, attn_implementation=attention.NAME, dtype=getattr(torch, dtype)
        ).eval()
    elif kind == "qwen2 with yarn":
        model = load_model(engine_config("qwen2", dtype=dtype, rope_scaling=YARN)).model
        assert model.model.rotary_emb.attention_scaling != 1
    else:
        model = load_model(engine_config(kind, dtype=dtype)).model
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind", ["llama", "llama with biases", "qwen2", "qwen2 with yarn", "qwen3"]
)
def test_it_computes_what_transformers_computes_bit_for_bit(kind: str, dtype: str) -> None:
    model = model_of(kind, dtype)
    decoder = decoder_of(model)
    assert decoder is not None
    layout = loaded(kind.split()[0]).kv_layout
    layout = KVLayout(layout.num_kv_heads, layout.head_dim, getattr(torch, dtype), (CPU, CPU))
    caches = KVCache(layout, 16, page_tokens=4), KVCache(layout, 16, page_tokens=4)
    prompt = random_prompt(30).tolist()
    first, second = PageTable([PageRun(0, 8)], 4), PageTable([PageRun(8, 16)], 4)
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


class Quantized(torch.nn.Linear):
    """Anything that is more than a product."""


def test_what_is_more_than_a_product_is_computed_by_transformers() -> None:
    prompt = random_prompt(20).tolist()

    def logits_of(model: torch.nn.Module) -> torch.Tensor:
        runner = Runner(model, KVCache(loaded().kv_layout, 8, 4), CPU, loaded().vocab_size)
        (logits,) = runner.run([Feed(prompt, 0, PageTable([PageRun(0, 8)], 4), num_wanted=20)])
        return logits

    model = load_model(engine_config()).model
    ordinary = logits_of(model)
    mlp = model.get_submodule("model.layers.1.mlp")
    weight, mlp.up_proj = mlp.up_proj.weight, Quantized(32, 64, bias=False)
    mlp.up_proj.weight = torch.nn.Parameter(2 * weight)
    assert decoder_of(model) is None
    assert not torch.equal(logits_of(model), ordinary)
    mlp.up_proj.weight = torch.nn.Parameter(weight.clone())
    assert torch.equal(logits_of(model), ordinary)


def test_a_checkpoint_that_says_it_is_quantized_is_left_to_transformers() -> None:
    """Some methods leave the projections' type as it is, and change what their weights are."""
    model = load_model(engine_config()).model
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    assert decoder_of(model) is None
