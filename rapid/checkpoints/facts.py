"""Facts of a model from its ``config.json``: whether engines can run it, and to what length.

Neither torch nor the weights are needed, so that preflight and loading refuse the same checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapid.checkpoints.files import checkpoint_source, read_json
from rapid.checkpoints.gguf import has_own_frequencies
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from rapid.planning.shapes import ModelShape

FAMILIES = ("llama", "qwen2", "qwen3")
# Rope types, and the parameters that each requires.
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
}
# In these families `use_sliding_window` turns the window on; in others naming it does.
_WINDOW_SWITCHED = ("qwen2", "qwen3")
_QWEN_FULL_LAYERS = 28  # the default of `max_window_layers` in transformers
# These change angles with the longest sequence seen, which would invalidate stored keys.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that an engine needs about a model before it is loaded.

    Attributes:
        shape: shape of the weights and KV.
        num_positions: positions that the model supports, after `rope_scaling` or the checkpoint's
            own YaRN; within them every layer attends to all tokens.
        rope_override: `rope_scaling` with its type under ``rope_type``; None keeps the
            checkpoint's own.
        dtype: dtype of the stored weights; None where the checkpoint does not say.
        quantization: quantization of the stored weights; None where there is none.
    """

    shape: ModelShape
    num_positions: int
    rope_override: dict[str, Any] | None
    dtype: str | None
    quantization: dict[str, Any] | None


def read_model_facts(config: EngineConfig) -> ModelFacts:
    """Read the facts of a model from its ``config.json``.

    Raises:
        ConfigurationError: the checkpoint or a setting is at fault; one sentence names it.
    """
    model = f"model {config.model!r}"
    settings = _read(config.model)
    if settings.get("model_type") not in FAMILIES:
        raise ConfigurationError(
            f"{model} is of the family {settings.get('model_type')!r}; "
            f"supported are {', '.join(FAMILIES)}"
        )
    positions = settings.get("max_position_embeddings")
    if not isinstance(positions, int):
        raise ConfigurationError(f"{model}: its config.json has no max_position_embeddings")
    if config.rope_scaling is None and has_own_frequencies(checkpoint_source(config.model)):
        raise ConfigurationError(
            f"{model} stores its RoPE frequencies as a tensor, which is not read: set rope_scaling "
            "to what the config.json of the original says"
        )
    own = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    num_positions, rope = _reach(config.rope_scaling, own, positions, model)
    num_positions = _seen(settings, config.max_context or num_positions, num_positions, model)
    shape = _shape(model, settings)
    _check_divisible(shape, config.tensor_parallel, model)
    return ModelFacts(
        shape=shape,
        num_positions=num_positions,
        rope_override=rope,
        dtype=settings.get("dtype") or settings.get("torch_dtype"),
        quantization=settings.get("quantization_config"),
    )


def _check_divisible(shape: ModelShape, num_parts: int, model: str) -> None:
    if what := shape.undivided(num_parts):
        raise ConfigurationError(
            f"{model} has {what}, which tensor_parallel: {num_parts} does not divide"
        )


def _reach(
    override: Mapping[str, Any] | None, own: Mapping[str, Any], positions: int, model: str
) -> tuple[int, dict[str, Any] | None]:
    """Return the positions after scaling and the validated override."""
    if override is None:
        # Qwen's YaRN configurations give the positions before scaling. With other types, and with
        # YaRN that names no original length, the positions are those after scaling.
        rope = _checked_rope(own, f"{model}: ", otherwise="default")
        original = rope.get("original_max_position_embeddings")
        is_yarn = rope["rope_type"] == "yarn" and original is not None
        return max(positions, int(original * rope["factor"]) if is_yarn else 0), None
    rope = _checked_rope(override, "rope_scaling: ")
    if rope["rope_type"] == "default":
        return positions, rope
    original = rope.get("original_max_position_embeddings", positions)
    return max(positions, int(original * rope.get("factor", 1))), rope


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
        return ModelShape.of(settings)
    except KeyError as error:
        raise ConfigurationError(f"{model}: its config.json has no {error.args[0]}") from error
    except (ValueError, TypeError) as error:
        what = " ".join(str(error).split())
        raise ConfigurationError(f"{model}: its config.json describes no model: {what}") from error


def _seen(settings: dict[str, Any], context: int, num_positions: int, model: str) -> int:
    """Return the positions within which every layer attends to all tokens, at least `context`.

    Raises:
        ConfigurationError: some layers attend within a narrower window, or are of another type.
    """
    layer_types = set(settings.get("layer_types") or ())
    if others := layer_types - {"full_attention", "sliding_attention"}:
        named = ", ".join(sorted(others))
        raise ConfigurationError(f"{model} has layers of {named}: not supported")
    is_switched = settings["model_type"] in _WINDOW_SWITCHED
    window = settings.get("sliding_window", "unnamed" if is_switched else None)
    slides = window is not None
    if layer_types:
        slides = "sliding_attention" in layer_types
    elif is_switched:
        first = settings.get("max_window_layers", _QWEN_FULL_LAYERS)
        is_on = bool(settings.get("use_sliding_window")) and first < settings["num_hidden_layers"]
        slides = slides and is_on
    if not slides:
        return num_positions
    if not isinstance(window, int) or window < context:
        raise ConfigurationError(
            f"{model} uses sliding windows of {window} tokens: not supported for a longer context; "
            "max_context sets it"
        )
    return min(num_positions, window)


def _checked_rope(
    rope: Mapping[str, Any], prefix: str, otherwise: str | None = None
) -> dict[str, Any]:
    """Return the validated parameters; older files name the rope type ``type``."""
    rope_type = rope.get("rope_type") or rope.get("type") or otherwise
    if rope_type in LENGTH_DEPENDENT_ROPES:
        raise ConfigurationError(
            f"{prefix}rope_type {rope_type!r} changes stored keys: not supported"
        )
    if rope_type not in tuple(ROPES):
        raise ConfigurationError(
            f"{prefix}rope_type {rope_type!r} is unknown; known are {', '.join(ROPES)}"
        )
    for name in ("factor", "original_max_position_embeddings", *ROPES[rope_type]):
        value = rope.get(name, None if name in ROPES[rope_type] else 1)
        least = 0 if name.endswith("freq_factor") else 1
        if not isinstance(value, (int, float)) or not least <= value < math.inf:
            raise ConfigurationError(
                f"{prefix}{name} must be a number of at least {least}, not {value!r}"
            )
    return {name: value for name, value in rope.items() if name != "type"} | {
        "rope_type": rope_type
    }
