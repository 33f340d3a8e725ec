"""Validation of `EngineConfig.quantization`, transformers' own `quantization_config`.

transformers drops keywords that it does not know, so a misspelt key would load another precision.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoQuantizationConfig

from rapid.errors import ConfigurationError


def quantization_config(settings: Mapping[str, object]) -> Any:
    """Return transformers' quantization configuration for these settings.

    Raises:
        ConfigurationError: the settings name no known method, have an unknown key, or have a value
            that the method refuses.
    """
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(_method(settings))
    if kind is None:
        methods = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise ConfigurationError(
            "quantization names no method that transformers knows: set load_in_4bit or "
            f"load_in_8bit (bitsandbytes), or quant_method to one of {methods}"
        )
    parameters = inspect.signature(kind.__init__).parameters.values()
    named = {each.name for each in parameters if each.kind != each.VAR_KEYWORD}
    known = (named | {"quant_method"}) - {"self"}
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigurationError(
                f"quantization.{key}: {kind.__name__} has no such key; {meant}"
            )
    try:
        return AutoQuantizationConfig.from_dict(dict(settings))
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigurationError(f"quantization: {' '.join(str(error).split())}") from error


def _method(settings: Mapping[str, object]) -> str:
    for bits in ("4bit", "8bit"):
        if settings.get(f"load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    return str(settings.get("quant_method"))
