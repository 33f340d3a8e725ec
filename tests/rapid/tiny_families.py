"""Tiny random checkpoints of the families whose layers are not Llama's, and their windows."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rapid.config import EngineConfig
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from tests.rapid.tiny_models import EOS, VOCAB, checkpoint

WINDOW = 24
SWITCHED_ON = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# By name: configuration, model, and settings beside the common ones.
MORE_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, SWITCHED_ON),
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        {"sliding_window": WINDOW, "rope_parameters": HALF_ROTATED},
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 16},
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 32,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "rope_parameters": YARN,
        },
    ),
}


def family_checkpoint(family: str, **settings: Any) -> Path:
    """A checkpoint of three layers and four heads; norms, sinks and experts' biases count."""
    return _checkpoint(family, json.dumps(settings))


@cache
def _checkpoint(family: str, settings: str) -> Path:
    config_class, model_class, own = MORE_FAMILIES[family]
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    model = model_class(config_class(**common | own | json.loads(settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("sinks", "proj_bias")):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    directory = Path(mkdtemp(prefix=f"tiny-{family}-"))
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((checkpoint() / name).read_bytes())
    return directory


def family_config(path: Path, **settings: Any) -> EngineConfig:
    defaults = {"device": "cpu", "dtype": "float32", "page_tokens": 8, "kv_cache_tokens": 1024}
    return EngineConfig(model=str(path), **defaults | settings)


def family_model(path: Path, **settings: Any) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(family_config(path, **settings))


def reference_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()
