"""Checkpoints: where they are, what of them is supported, on which device and in which dtype.

Device and dtype are decided here and nowhere else. Weights come from safetensors only and no code
of a checkpoint is ever run.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rapid.config import EngineConfig
from rapid.engines import attention
from rapid.engines.checkpoints import checkpoint_source, read_eos_ids
from rapid.engines.kv_cache import KVLayout
from rapid.engines.vocabulary import num_ids
from rapid.errors import ConfigurationError

FAMILIES = ("llama", "qwen2", "qwen3")
# These change angles with the longest sequence seen, so KV already stored would no longer fit.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for engines; several engines may share one.

    Attributes:
        model: the transformers model, its attention set to ours.
        eos_ids: tokens that end an answer.
        vocab_size: ids that mean something; logits beyond are padding of the checkpoint.
        embedding_rows: ids that may be fed.
        max_context: positions the model was made for, after `rope_scaling`.
        device: where input ids go.
        kv_layout: keys and values, layer by layer.
    """

    name: str
    model: torch.nn.Module
    tokenizer: Any
    eos_ids: frozenset[int]
    vocab_size: int
    embedding_rows: int
    max_context: int
    device: torch.device
    dtype: torch.dtype
    kv_layout: KVLayout


def load_model(config: EngineConfig) -> LoadedModel:
    """Load weights and tokenizer.

    Raises:
        ConfigurationError: with one sentence about the checkpoint or setting at fault.
    """
    source = checkpoint_source(config.model)
    model_config = _model_config(config)
    tokenizer = load_tokenizer(config)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            config=copy.deepcopy(model_config),
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=attention.NAME,
            device_map="auto" if config.device == "balanced" else None,
        )
    except OSError as error:
        raise ConfigurationError(
            f"model {config.model!r}: no safetensors weights could be read ({_first_line(error)})"
        ) from error
    if config.device != "balanced":
        model = model.to(device)
    model = model.eval().requires_grad_(False)
    return LoadedModel(
        name=config.model,
        model=model,
        tokenizer=tokenizer,
        eos_ids=read_eos_ids(source, tokenizer),
        vocab_size=min(model_config.vocab_size, num_ids(tokenizer)),
        embedding_rows=model_config.vocab_size,
        max_context=_max_context(config, model_config),
        device=device,
        dtype=dtype,
        kv_layout=KVLayout(
            num_kv_heads=model_config.num_key_value_heads,
            head_dim=_head_dim(model_config),
            dtype=dtype,
            devices=tuple(_layer_device(layer, device) for layer in model.model.layers),
        ),
    )


def load_tokenizer(config: EngineConfig) -> Any:
    """The checkpoint's tokenizer, without its weights."""
    try:
        return PreTrainedTokenizerFast.from_pretrained(checkpoint_source(config.model))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"model {config.model!r} has no usable tokenizer: {_first_line(error)}"
        ) from error


def _model_config(config: EngineConfig) -> Any:
    source = checkpoint_source(config.model)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ConfigurationError(f"model {config.model!r}: the directory holds no config.json")
    try:
        model_config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model {config.model!r} is neither a checkpoint directory nor a model the hub "
            f"provides: {_first_line(error)}"
        ) from error
    if model_config.model_type not in FAMILIES:
        raise ConfigurationError(
            f"model {config.model!r} is of the family {model_config.model_type!r}; "
            f"supported are {', '.join(FAMILIES)}"
        )
    layer_types = set(getattr(model_config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ConfigurationError(f"model {config.model!r} uses sliding windows: not supported")
    if config.rope_scaling is not None:
        _override_rope(config, model_config)
    rope_type = model_config.rope_parameters["rope_type"]
    if rope_type in LENGTH_DEPENDENT_ROPE:
        raise ConfigurationError(
            f"model {config.model!r}: rope type {rope_type!r} changes stored keys: not supported"
        )
    return model_config


def _override_rope(config: EngineConfig, model_config: Any) -> None:
    """Replace the checkpoint's rope scaling, keeping its base (`rope_parameters` in version 5)."""
    scaling = dict(config.rope_scaling or {})
    scaling["rope_type"] = scaling.pop("rope_type", None) or scaling.pop("type", "default")
    scaling.pop("type", None)
    scaling.setdefault("rope_theta", model_config.rope_parameters["rope_theta"])
    if scaling["rope_type"] not in {"default", *ROPE_INIT_FUNCTIONS}:
        raise ConfigurationError(
            f"rope_scaling: rope_type {scaling['rope_type']!r} is unknown; "
            f"known are default, {', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    model_config.rope_parameters = scaling
    try:
        model_config.standardize_rope_params()
        model_config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigurationError(f"rope_scaling: {_first_line(error)}") from error


def _max_context(config: EngineConfig, model_config: Any) -> int:
    positions = int(model_config.max_position_embeddings)
    if config.rope_scaling is None:
        return positions
    rope = model_config.rope_parameters
    original = int(rope.get("original_max_position_embeddings", positions))
    return max(positions, int(original * float(rope.get("factor", 1.0))))


def _device(name: str) -> torch.device:
    if name in ("auto", "balanced"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device {name!r}: {_first_line(error)}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {name!r}: no CUDA device is visible")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _layer_device(layer: torch.nn.Module, main: torch.device) -> torch.device:
    """Where a layer computes; weights that accelerate keeps elsewhere come to the main device."""
    execution_device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    if isinstance(execution_device, int):
        return torch.device("cuda", execution_device)
    if execution_device is not None:
        return torch.device(execution_device)
    device = next(layer.parameters()).device
    return main if device.type == "meta" else device


def _head_dim(model_config: Any) -> int:
    explicit = getattr(model_config, "head_dim", None)
    return int(explicit or model_config.hidden_size // model_config.num_attention_heads)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [error.__class__.__name__])[0]
