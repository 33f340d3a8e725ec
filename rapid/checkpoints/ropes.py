"""Rotary position embeddings (RoPE) of a checkpoint: which scalings engines can run, and how far.

An engine stores keys rotated by their positions, so angles must not depend on a sequence's length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rapid.errors import ConfigurationError

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
    "longrope": ("short_factor", "long_factor"),
}
_LISTS = ("short_factor", "long_factor")
_PHI_NAMES = ("su", "yarn")  # what Phi-3 checkpoints call `longrope`
_PHI_ORIGINAL = 4096  # default of `original_max_position_embeddings` in Phi-3

Rope = dict[str, Any]


def reach(
    override: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    max_context: int | None,
    model: str,
) -> tuple[int, Rope | None]:
    """Return the positions that a model supports after scaling, and the rope that replaces its own.

    The rope is None where the checkpoint's own stays. A model whose sliding layers have a rope of
    their own keeps that one.

    Raises:
        ConfigurationError: the scaling is unknown, incomplete, or cannot be run.
    """
    positions = settings.get("max_position_embeddings")
    if not isinstance(positions, int):
        raise ConfigurationError(f"{model}: its config.json has no max_position_embeddings")
    if override is not None:
        rope = _validate(override, "rope_scaling: ")
        return _override(rope, positions, settings, max_context)
    _check_sliding(settings, model)
    rope = _validate(_own(settings), f"{model}: ", otherwise="default")
    if rope["rope_type"] == "dynamic":  # no scaling within the checkpoint's positions
        return positions, {"rope_type": "default"}
    if rope["rope_type"] == "longrope":
        return positions, _for_length(rope, max_context or positions, positions, settings)
    # Qwen's YaRN configurations give the positions before scaling. With other types, and with
    # YaRN that names no original length, the positions are those after scaling.
    original = rope.get("original_max_position_embeddings")
    is_yarn = rope["rope_type"] == "yarn" and original is not None
    return max(positions, int(original * rope["factor"]) if is_yarn else 0), None


def _override(
    rope: Rope, positions: int, settings: Mapping[str, Any], max_context: int | None
) -> tuple[int, Rope]:
    if rope["rope_type"] == "dynamic":
        raise ConfigurationError(
            "rope_scaling: rope_type 'dynamic' changes the angles of stored keys as a sequence "
            "grows: not supported; take yarn or linear"
        )
    if rope["rope_type"] == "default":
        return positions, rope
    original = rope.get("original_max_position_embeddings", positions)
    num_positions = max(positions, int(original * rope.get("factor", 1)))
    if rope["rope_type"] == "longrope":
        rope = _for_length(rope, max_context or num_positions, positions, settings)
    return num_positions, rope


def _own(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the checkpoint's scaling, of its full layers if the sliding ones have another."""
    own = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    own = own.get("full_attention", own) or {}
    name = own.get("rope_type") or own.get("type")
    if settings["model_type"] == "phi3" and name in _PHI_NAMES:
        return {**own, "rope_type": "longrope"}
    return own


def _check_sliding(settings: Mapping[str, Any], model: str) -> None:
    """Check the rope of sliding layers, where they have their own; it is never replaced."""
    own = (settings.get("rope_parameters") or {}).get("sliding_attention") or {}
    rope_type = _validate(own, f"{model}: ", otherwise="default")["rope_type"]
    if rope_type in ("dynamic", "longrope"):
        raise ConfigurationError(
            f"{model}: rope_type {rope_type!r} of sliding layers is not supported"
        )


def _for_length(rope: Rope, longest: int, positions: int, settings: Mapping[str, Any]) -> Rope:
    """Return a `longrope` with the one list of factors that sequences up to `longest` need."""
    original = rope.get("original_max_position_embeddings", positions)
    if settings["model_type"] == "phi3":  # its own setting goes before that of the scaling
        original = settings.get("original_max_position_embeddings", _PHI_ORIGINAL)
    factors = rope["long_factor" if longest > original else "short_factor"]
    return rope | {
        "original_max_position_embeddings": original,
        "short_factor": factors,
        "long_factor": factors,
    }


def _validate(rope: Mapping[str, Any], prefix: str, otherwise: str | None = None) -> Rope:
    """Return the validated parameters; older files name the rope type ``type``."""
    rope_type = rope.get("rope_type") or rope.get("type") or otherwise
    if rope_type not in (*ROPES, "dynamic"):
        raise ConfigurationError(
            f"{prefix}rope_type {rope_type!r} is unknown; known are {', '.join(ROPES)}"
        )
    required = ROPES.get(rope_type, ())
    for name in _LISTS if rope_type == "longrope" else ():
        factors = rope.get(name)
        if not isinstance(factors, list) or not all(map(_is_number, factors)):
            raise ConfigurationError(f"{prefix}{name} must be a list of numbers, not {factors!r}")
    for name in ("factor", "original_max_position_embeddings", *required):
        value = rope.get(name, None if name in required else 1)
        least = 0 if name.endswith("freq_factor") else 1
        if name not in _LISTS and not (_is_number(value) and least <= value):
            raise ConfigurationError(
                f"{prefix}{name} must be a number of at least {least}, not {value!r}"
            )
    return {name: value for name, value in rope.items() if name != "type"} | {
        "rope_type": rope_type
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
