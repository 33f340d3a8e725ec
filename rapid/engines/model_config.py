"""What a checkpoint says of its model, read without its weights: is it one that engines can run?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rapid.config import EngineConfig
from rapid.engines.checkpoints import checkpoint_source
from rapid.errors import ConfigurationError

FAMILIES = ("llama", "qwen2", "qwen3")
# These change angles with the longest sequence seen, so KV already stored would no longer fit.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def read_model_config(config: EngineConfig) -> Any:
    """The transformers configuration of a supported model, with `rope_scaling` in it.

    Raises:
        ConfigurationError: with one sentence about the checkpoint or setting at fault.
    """
    source = checkpoint_source(config.model)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ConfigurationError(f"model {config.model!r}: the directory holds no config.json")
    try:
        model_config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model {config.model!r} is neither a checkpoint directory nor a model the hub "
            f"provides: {first_line(error)}"
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
    scaling["rope_type"] = scaling.get("rope_type") or scaling.get("type")
    scaling.pop("type", None)
    scaling.setdefault("rope_theta", model_config.rope_parameters["rope_theta"])
    if scaling["rope_type"] not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ConfigurationError(
            f"rope_scaling: rope_type {scaling['rope_type']!r} is unknown; "
            f"known are default, {', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    for name in ("factor", "original_max_position_embeddings"):
        value = scaling.get(name, 1)
        if not isinstance(value, (int, float)) or not 1 <= value < math.inf:
            raise ConfigurationError(
                f"rope_scaling: {name} must be a number of at least 1, not {value!r}"
            )
    model_config.rope_parameters = scaling
    try:
        model_config.standardize_rope_params()
        model_config.validate_rope()
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigurationError(f"rope_scaling: {first_line(error)}") from error


def num_positions(config: EngineConfig, model_config: Any) -> int:
    """Positions the model was made for, after `rope_scaling`."""
    positions = int(model_config.max_position_embeddings)
    rope = model_config.rope_parameters
    if config.rope_scaling is None or rope["rope_type"] == "default":
        return positions
    original = rope.get("original_max_position_embeddings", positions)
    return max(positions, int(original * rope.get("factor", 1)))


def first_line(error: BaseException) -> str:
    """An error of a library, short enough for a sentence of ours."""
    return (str(error).strip().splitlines() or [error.__class__.__name__])[0]
