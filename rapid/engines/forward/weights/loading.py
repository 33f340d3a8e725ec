"""Loads models from safetensors or GGUF files, and decides device and dtype.

No code of a checkpoint is ever run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import EmptyTqdm, set_tqdm_hook

from rapid.catalogue import check_weights
from rapid.checkpoints.facts import ModelFacts, read_model_facts
from rapid.checkpoints.files import checkpoint_source, load_tokenizer, read_eos_ids
from rapid.checkpoints.gguf import is_gguf, read_header, read_settings
from rapid.checkpoints.memory import (
    ALL_GPUS,
    _size,
    check_fits,
    free_bytes,
    memory_needs,
    plan_pages,
)
from rapid.checkpoints.vocabulary import num_ids
from rapid.config import EngineConfig
from rapid.engines.attention import ragged as attention
from rapid.engines.forward.layers.decoder import decoder_of
from rapid.engines.forward.linear.half_products import can_pack, pack_halves
from rapid.engines.forward.linear.products import check_method, check_stored, quantize
from rapid.engines.forward.sharding.shards import RankPart, Shard, read_shard, shard_weights
from rapid.engines.forward.weights.gguf_weights import has_few_bits, read_weights
from rapid.engines.forward.weights.quantization import (
    TEXT_NAMES,
    StoredWeights,
    quantization_config,
)
from rapid.engines.kv.cache import KVLayout
from rapid.engines.kv.fp8 import check_device
from rapid.errors import ConfigurationError, first_line
from rapid.planning.families import sliding_layers, window_of
from rapid.planning.plan import MemoryNeed
from rapid.planning.ring_sizes import RingPlan, ring_plan

_NO_SCALING = ("rope_theta", "partial_rotary_factor")  # what rope parameters hold beside a scaling


class ModelParts(Protocol):
    """The processes that hold the other parts of a model; see `rapid.engines.parallel.gang`."""

    def close(self) -> None:
        """End them."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for engines; several engines may share one."""

    config: EngineConfig
    model: torch.nn.Module  # the transformers model, with its attention set to `ragged_attention`
    tokenizer: Any  # the Hugging Face tokenizer
    eos_ids: frozenset[int]  # ids of the tokens that end an answer
    vocab_size: int  # number of ids that stand for a token; logits beyond are padding
    embedding_rows: int  # number of ids that the model takes as input
    max_context: int  # positions that the model supports, after `rope_scaling`
    device: torch.device  # device of the input ids
    dtype: torch.dtype  # dtype of the KV, and of weights that are not quantized
    kv_layout: KVLayout  # shape, dtype and devices of the keys and values, as they are computed
    # The rank, if this is one rank's part of a model that several processes compute.
    place: RankPart | None = None
    followers: ModelParts | None = None  # those that hold the other parts, for the first rank


def load_model(
    config: EngineConfig,
    *,
    with_pools: bool = False,
    shard: Shard | None = None,
    num_machines: int = 1,
) -> LoadedModel:
    """Load weights and tokenizer.

    Args:
        with_pools: whether an engine of these settings will be made, whose KV must fit, too.
        shard: the part of the model to load; None loads the whole. A part cannot compute before it
            has a `RankPart` (`rapid.engines.parallel`).
        num_machines: machines that have equally many of the model's parts.

    Raises:
        ConfigurationError: the checkpoint or a setting is at fault (one sentence names it), or the
            device lacks the memory (with the numbers), which is checked before weights are read.
    """
    source = checkpoint_source(config.model)
    facts = read_model_facts(config)
    model_config = _transformers_config(source, facts)
    tokenizer = load_tokenizer(config.model)
    device = _device(config.device)
    if shard is not None and device.type == "cuda":
        device = torch.device("cuda", shard.rank % torch.cuda.device_count())  # of this machine
        torch.cuda.set_device(device)  # or pinning memory, say, makes a context on the first one
    dtype = _dtype(config.dtype, device)
    own_method = quantization = stored = None
    if isinstance(config.quantization, str):
        own_method = config.quantization
        check_method(own_method, device, dtype)
    elif facts.stored is not None:
        check_stored(facts.stored, device, dtype)
        stored = StoredWeights(source, facts.stored, shard, model_config)
    elif isinstance(config.quantization, dict) and config.quantization:
        quantization = quantization_config(config.quantization)
    if config.kv_cache_dtype == "fp8":
        check_device(device)
    if shard is None or not shard.rank:
        check_memory(config, with_pools=with_pools, num_machines=num_machines)
    part = shard
    if facts.has_mxfp4:
        part = shard or Shard(0, 1)
    if facts.has_mxfp4 or stored is not None:
        vars(model_config).pop("quantization_config", None)  # or transformers would read it
    is_packed = own_method is not None or stored is not None
    home = torch.device("cpu") if is_packed else device
    model = _load_weights(config, source, model_config, quantization, home, dtype, part, stored)
    if own_method is not None:
        quantize(model, own_method, device)
    if stored is not None:
        stored.pack(model, device)
    if is_packed:
        model = model.to(device)
    model = model.eval().requires_grad_(False)
    # Fuses its weights before anything else takes the memory for it.
    is_fused = decoder_of(model) is not None
    if shard is not None and not is_fused:
        raise ConfigurationError(
            f"model {config.model!r} cannot be split over processes, as its projections are more "
            "than products: leave tensor_parallel out"
        )
    if is_fused and dtype == torch.float32 and _may_pack(source, device):
        pack_halves(model)
    return LoadedModel(
        config=config,
        model=model,
        tokenizer=tokenizer,
        eos_ids=read_eos_ids(source, tokenizer),
        vocab_size=min(model_config.vocab_size, num_ids(tokenizer)),
        embedding_rows=model_config.vocab_size,
        max_context=facts.num_positions,
        device=device,
        dtype=dtype,
        kv_layout=KVLayout(
            num_kv_heads=model.config.num_key_value_heads,
            head_dim=_head_dim(model_config),
            dtype=dtype,
            devices=tuple(_layer_device(layer) for layer in model.model.layers),
            window=window_of(model_config.to_dict()),
            sliding=tuple(sliding_layers(model_config.to_dict())),
        ),
    )


def _may_pack(source: str, device: torch.device) -> bool:
    """Return whether weights in float16 stand for those of a checkpoint on a device."""
    if device.type != "cpu" or not is_gguf(source):
        return False
    return has_few_bits(read_header(source)) and can_pack()


def check_memory(*configs: EngineConfig, with_pools: bool = False, num_machines: int = 1) -> None:
    """Raise ConfigurationError, with numbers, unless the devices can hold all models together."""
    needs: dict[str, list[tuple[str, MemoryNeed]]] = {}
    for config in configs:
        device = _device(config.device)
        on_gpu = device.type == "cuda"
        where = "balanced" if on_gpu and config.device == "balanced" else str(device)
        facts = read_model_facts(config)
        ours, hosts = memory_needs(
            config, facts, on_gpu=on_gpu, with_pools=with_pools, num_machines=num_machines
        )
        needs.setdefault(where, []).append((config.model, ours))
        if hosts.total:
            needs.setdefault("cpu", []).append((config.model, hosts))
    for where, together in needs.items():
        name = ALL_GPUS if where == "balanced" else where
        check_fits(together, name, free_bytes(where))


@contextmanager
def without_bars() -> Iterator[None]:
    """Show no bar of transformers within the block: who loads models in a program wants none."""
    # Unlike `disable_progress_bar` it tells what was there before, and spares bars of downloads.
    before = set_tqdm_hook(lambda _factory, given, named: EmptyTqdm(*given, **named))
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _load_weights(
    config: EngineConfig,
    source: str,
    model_config: Any,
    quantization: Any,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard | None = None,
    stored: StoredWeights | None = None,
) -> Any:
    """Return the model on its device; quantized weights are created there and never moved."""
    settings: dict[str, Any] = {}
    own = copy.deepcopy(model_config)
    if shard is not None:
        own = shard.settings(model_config, _head_dim(model_config))
    if model_config.model_type == "gemma3_text":
        settings["key_mapping"] = TEXT_NAMES
    if quantization is not None:
        settings["quantization_config"] = quantization
    is_quantized = quantization is not None or hasattr(model_config, "quantization_config")
    if config.device == "balanced":
        settings["device_map"] = "auto"
    elif is_quantized:
        settings["device_map"] = {"": device}
    weights, model_class = None, AutoModelForCausalLM
    if is_gguf(source):
        check_weights(config.model)
        weights = read_weights(read_header(source), read_settings(source), dtype)
        weights = weights if shard is None else shard_weights(weights, shard, model_config)
    elif stored is not None:
        weights = stored.read_others(dtype)
    elif shard is not None:
        weights = read_shard(source, shard, dtype, model_config)
    if weights is not None:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    try:
        model, read = model_class.from_pretrained(
            source if weights is None else None,
            state_dict=weights,
            config=own,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            attn_implementation=attention.NAME,
            **settings,
        )
    except OSError as error:
        raise ConfigurationError(
            f"model {config.model!r}: no safetensors weights could be read ({first_line(error)})"
        ) from error
    except (ImportError, ValueError, RuntimeError) as error:
        if not is_quantized:
            raise
        raise ConfigurationError(
            f"model {config.model!r} cannot be loaded quantized: {first_line(error)}"
        ) from error
    if (weights is not None or "key_mapping" in settings) and read["missing_keys"]:
        raise ConfigurationError(
            f"model {config.model!r}: the file does not hold {min(read['missing_keys'])}"
        )
    if device.type == "cuda":
        _check_on_gpus(config, getattr(model, "hf_device_map", {}))
    return model if "device_map" in settings else model.to(device)


def _check_on_gpus(config: EngineConfig, device_map: Mapping[str, int | str]) -> None:
    """Check that accelerate put every layer on a GPU, and none in the host's memory or on disk."""
    # It would move the others to a GPU at each step: slower by orders of magnitude without a word.
    elsewhere = [layer for layer, place in device_map.items() if str(place) in ("cpu", "disk")]
    if elsewhere:
        raise ConfigurationError(
            f"device: {config.device} does not fit: {len(elsewhere)} parts of {config.model!r}, "
            f"from {elsewhere[0]} on, would not be on a GPU; give the engine more GPUs "
            "(pool.num_gpus), or set quantization"
        )


def _transformers_config(source: str, facts: ModelFacts) -> Any:
    """Load transformers' configuration and replace its rope (`rope_parameters` in version 5)."""
    try:
        if is_gguf(source):
            model_config = AutoConfig.for_model(**read_settings(source))
        else:
            model_config = AutoConfig.from_pretrained(source).get_text_config()
        if facts.rope_override is not None:
            _override_rope(model_config, facts.rope_override)
            model_config.standardize_rope_params()
            model_config.validate_rope()
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"the configuration of {source} cannot be used: {first_line(error)}"
        ) from error
    return model_config


def _override_rope(model_config: Any, override: Mapping[str, Any]) -> None:
    """Replace the scaling; base, rotated share and the rope of sliding layers stay."""
    own = model_config.rope_parameters
    replaced = own.get("full_attention", own)
    kept = {name: replaced[name] for name in _NO_SCALING if name in replaced}
    scaled = kept | dict(override)
    model_config.rope_parameters = (
        {**own, "full_attention": scaled} if replaced is not own else scaled
    )


def _device(name: str) -> torch.device:
    if name in ("auto", "balanced"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {name!r}: no CUDA device is visible")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _layer_device(layer: torch.nn.Module) -> torch.device:
    """Return the device that a layer computes on."""
    execution_device = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    if isinstance(execution_device, int):
        return torch.device("cuda", execution_device)
    if execution_device is not None:
        return torch.device(execution_device)
    return next(layer.parameters()).device


def _head_dim(model_config: Any) -> int:
    explicit = getattr(model_config, "head_dim", None)
    return int(explicit or model_config.hidden_size // model_config.num_attention_heads)


def kv_layout_of(loaded: LoadedModel, config: EngineConfig) -> KVLayout:
    """Return the layout of an engine's KV, or raise ConfigurationError if fp8 cannot be read."""
    if config.kv_cache_dtype == "auto":
        return loaded.kv_layout
    check_device(loaded.device)
    return replace(loaded.kv_layout, is_fp8=True)


def plan_rings(loaded: LoadedModel, config: EngineConfig) -> RingPlan | None:
    """Return the rings of an engine; None where its pages hold the KV of all layers."""
    layout = loaded.kv_layout
    return ring_plan(config, layout.window if any(layout.sliding) else None)


def plan_kv_pages(loaded: LoadedModel, config: EngineConfig) -> tuple[int, int]:
    """Return the longest sequence and the number of pages that `plan_pages` plans for a model.

    Raises:
        ConfigurationError: as `plan_pages`, or the model's device lacks the memory.
    """
    max_context, num_pages = plan_pages(config, loaded.max_context)
    room = num_pages * config.page_tokens
    rings = plan_rings(loaded, config)
    layout = kv_layout_of(loaded, config)
    num_bytes = layout.num_bytes(room, rings.num_tokens if rings else 0)
    if len(set(loaded.kv_layout.devices)) == 1:
        device = str(loaded.device)
        free = free_bytes(device)
        if num_bytes > free:
            raise ConfigurationError(
                f"a KV pool of {room:,} tokens takes {_size(num_bytes)}; {device} has "
                f"{_size(free)} left after the weights of {config.model!r}: lower kv_cache_tokens"
            )
    return max_context, num_pages
