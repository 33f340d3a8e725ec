"""Facts of a model from its ``config.json``: whether engines can run it, and to what length.

Of a model that vLLM runs, vLLM knows them.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid.checkpoints.files import checkpoint_source, read_json
from rapid.checkpoints.gguf import has_own_frequencies
from rapid.checkpoints.ropes import reach
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.planning.families import refusal, sliding_layers, window_of
from rapid.planning.packed_bits import (
    BITS,
    MXFP4,
    PACKED_ROWS,
    STORED_METHODS,
    StoredBits,
    find_ungrouped,
    unpackable,
)
from rapid.planning.shapes import ModelShape

_LEAST_VLLM = (0, 30)  # whose calls and samplers were read


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that an engine needs about a model before it is loaded."""

    shape: ModelShape  # shape of the weights and KV
    # Positions that the model supports, after `rope_scaling` or the checkpoint's own YaRN.
    num_positions: int
    # Parameters that replace those of the checkpoint's RoPE; None keeps them.
    rope_override: dict[str, Any] | None
    dtype: str | None  # dtype of the stored weights; None where the checkpoint does not say
    # Quantization of the stored weights; None where there is none.
    quantization: dict[str, Any] | None
    # The same, where it is packed for our own decoder; others are left to transformers.
    stored: StoredBits | None = None

    @property
    def has_mxfp4(self) -> bool:
        """Whether weights are stored in MXFP4, which are in memory as other weights are."""
        return (self.quantization or {}).get("quant_method") == MXFP4


def read_model_facts(config: EngineConfig) -> ModelFacts:
    """Read the facts of a model from its ``config.json``.

    Raises:
        ConfigurationError: the checkpoint or a setting is at fault; one sentence names it.
    """
    model = f"model {config.model!r}"
    whole = _read(config.model)
    settings = text_settings(whole)
    if whole is not settings and config.tensor_parallel > 1:
        raise ConfigurationError(
            f"{model} reads images as well, which tensor_parallel does not split: leave it out, or "
            "take a checkpoint of the text model alone"
        )
    if why := refusal(settings.get("model_type")):
        raise ConfigurationError(
            f"{model} is of the family {settings.get('model_type')!r}, which cannot be run: {why}"
        )
    if config.rope_scaling is None and has_own_frequencies(checkpoint_source(config.model)):
        raise ConfigurationError(
            f"{model} stores its RoPE frequencies as a tensor, which is not read: set rope_scaling "
            "to what the config.json of the original says"
        )
    num_positions, rope = reach(config.rope_scaling, settings, config.max_context, model)
    shape = _shape(model, settings)
    # compressed-tensors named it otherwise at first.
    quantization = settings.get("quantization_config") or settings.get("compression_config")
    stored = _read_stored(quantization, config, model)
    _check_setting(shape, config, stored, model)
    return ModelFacts(
        shape=shape,
        num_positions=num_positions,
        rope_override=rope,
        dtype=settings.get("dtype") or settings.get("torch_dtype"),
        quantization=quantization,
        stored=stored,
    )


def check_vllm() -> None:
    """Raise ConfigurationError unless a vLLM is installed whose calls are those used here."""
    least = ".".join(map(str, _LEAST_VLLM))
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(
            f"kind: vllm needs vllm {least} or later, and none is installed: pip install "
            "'rapid-serve[vllm]', or leave kind out"
        ) from None
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _LEAST_VLLM:
        raise ConfigurationError(
            f"kind: vllm needs vllm {least} or later, and {found} is installed: install a later one"
        )


def _read_stored(
    quantization: Mapping[str, Any] | None, config: EngineConfig, model: str
) -> StoredBits | None:
    """Return how the weights are stored, or None if not quantized or for transformers to read."""
    if quantization is None:
        return None
    method, asked = quantization.get("quant_method", "bitsandbytes"), config.quantization
    is_ours = method in (*STORED_METHODS, MXFP4)
    is_same = isinstance(asked, dict) and asked.get("quant_method", "bitsandbytes") == method
    if asked is not None and (is_ours or not is_same):
        raise ConfigurationError(f"{model} is stored quantized: leave quantization out")
    if not is_ours:
        _check_method(method, config, model)
        return None
    if config.device == "balanced":
        raise ConfigurationError(
            f"{model} is stored quantized ({method}), which is not for layers that accelerate "
            "places: set device to auto, cpu or cuda"
        )
    if method == MXFP4:
        return None
    try:
        stored = StoredBits.of(quantization)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{model} has a quantization_config that cannot be read: {error!r}"
        ) from error
    if isinstance(stored, str):
        raise ConfigurationError(
            f"{model} is stored quantized ({method}), but {stored}: take another checkpoint of it"
        )
    return stored


def _check_method(method: str, config: EngineConfig, model: str) -> None:
    """Check that transformers reads a quantization, and computes it as the settings ask."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # imports torch

    known = {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}
    if method not in known:
        raise ConfigurationError(
            f"{model} is stored quantized by {method!r}, which is not known: take a checkpoint of "
            f"{', '.join(STORED_METHODS)}, or of {', '.join(sorted(known - {*STORED_METHODS}))}"
        )
    if config.tensor_parallel > 1:
        raise ConfigurationError(
            f"{model} is stored quantized by {method!r}, which tensor_parallel does not split: "
            f"leave it out, or take a checkpoint of {', '.join(STORED_METHODS)}"
        )


def text_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the text model, where a Gemma 3 checkpoint reads images as well."""
    if settings.get("model_type") != "gemma3":
        return settings
    # Such a file leaves most settings to the defaults of transformers, which imports torch.
    from transformers import AutoConfig

    given = dict(settings.get("text_config") or {}) | {"model_type": "gemma3_text"}
    try:
        text: dict[str, Any] = AutoConfig.for_model(**given).to_dict()
    except (ValueError, TypeError, AttributeError) as error:
        what = " ".join(str(error).split())
        raise ConfigurationError(f"the text_config of a gemma3 model is wrong: {what}") from error
    names = ("dtype", "torch_dtype", "quantization_config", "compression_config")
    return text | {name: settings[name] for name in names if name in settings}


def _check_setting(
    shape: ModelShape, config: EngineConfig, stored: StoredBits | None, model: str
) -> None:
    """Check that the model can be computed as the settings ask."""
    asked = {
        "deterministic": config.deterministic,
        f"quantization: {config.quantization}": isinstance(config.quantization, str),
        f"weights that are stored quantized ({stored})": stored is not None,
    }
    if shape.experts and any(asked.values()):
        names = " and ".join(name for name, is_asked in asked.items() if is_asked)
        raise ConfigurationError(
            f"{model} is a mixture of experts, which is not built for {names}: leave that out"
        )
    if what := shape.find_undivided(config.tensor_parallel):
        raise ConfigurationError(
            f"{model} has {what}, which tensor_parallel: {config.tensor_parallel} does not divide"
        )
    part = shape.part_of(config.tensor_parallel)
    is_packed = config.quantization == "int4" or (stored is not None and stored.bits == BITS)
    if is_packed and (what := unpackable(part)):
        of_rank = " of each process" if config.tensor_parallel > 1 else ""
        packing = "quantization: int4 packs" if stored is None else f"weights of {BITS} bits are in"
        raise ConfigurationError(
            f"{model} has {what}{of_rank}, and {packing} {PACKED_ROWS} together: "
            "leave it out, or take another model or tensor_parallel"
        )
    if stored is not None and (what := find_ungrouped(shape, stored)):
        raise ConfigurationError(
            f"{model} has {what}, which its groups of {stored.group} do not divide: take another "
            "checkpoint of it"
        )


def _check_layers(settings: Mapping[str, Any], model: str) -> None:
    """Check that every layer attends to all tokens before it, or to the last ones of them."""
    layer_types = set(settings.get("layer_types") or ())
    if others := layer_types - {"full_attention", "sliding_attention"}:
        named = ", ".join(sorted(others))
        raise ConfigurationError(f"{model} has layers of {named}: not supported")
    if settings.get("use_bidirectional_attention"):
        raise ConfigurationError(
            f"{model} attends to later tokens as well (use_bidirectional_attention): not supported"
        )
    window = window_of(settings)
    is_llama = settings.get("model_type") == "llama"
    is_named = is_llama and settings.get("sliding_window") is not None
    if window is None and (is_named or "sliding_attention" in layer_types):
        raise ConfigurationError(
            f"{model} names sliding windows, but its family has none or they are switched off: "
            "correct its config.json"
        )
    if any(sliding_layers(settings)) and not (isinstance(window, int) and window > 0):
        raise ConfigurationError(f"{model} has sliding windows of {window!r} tokens")


def _read(model: str) -> dict[str, Any]:
    source = checkpoint_source(model)
    try:
        settings = read_json(source, "config.json")
    except ValueError as error:
        raise ConfigurationError(f"model {model!r}: its config.json is no JSON: {error}") from error
    if settings is None and Path(source).is_dir():
        raise ConfigurationError(f"model {model!r}: the directory holds no config.json")
    if settings is None:
        raise ConfigurationError(
            f"model {model!r} is neither a checkpoint directory nor a model that the hub gave: "
            "check the name and the network"
        )
    return settings


def _shape(model: str, settings: dict[str, Any]) -> ModelShape:
    try:
        _check_layers(settings, model)
        return ModelShape.of(settings)
    except KeyError as error:
        raise ConfigurationError(f"{model}: its config.json has no {error.args[0]}") from error
    except (ValueError, TypeError) as error:
        what = " ".join(str(error).split())
        raise ConfigurationError(f"{model}: its config.json describes no model: {what}") from error
