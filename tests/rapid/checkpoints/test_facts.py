"""How far a model reaches, from its ``config.json`` alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapid.checkpoints.facts import read_model_facts
from rapid.config import EngineConfig
from rapid.errors import ConfigurationError
from tests.rapid.tiny_models import (
    checkpoint,
    copied,
)

LAYERS = ["full_attention", "sliding_attention"]


WINDOW_64 = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}


@pytest.mark.parametrize(
    "windows",
    [
        {"sliding_window": 64},
        {"model_type": "qwen2"} | WINDOW_64,
        {"model_type": "qwen3"} | WINDOW_64,
        {"model_type": "qwen2", "sliding_window": 64, "layer_types": LAYERS},
    ],
)
def test_a_window_is_refused_by_name_unless_the_context_lies_within(
    tmp_path: Path, windows: dict[str, object]
) -> None:
    path = str(copied(tmp_path, **windows))
    for max_context in (None, 65):
        with pytest.raises(ConfigurationError, match="sliding windows of 64 tokens"):
            read_model_facts(EngineConfig(model=path, max_context=max_context))
    assert read_model_facts(EngineConfig(model=path, max_context=64)).num_positions == 64


@pytest.mark.parametrize(
    "windows",
    [
        {"sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 64},
        {"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": False},
        {"model_type": "qwen2"} | WINDOW_64 | {"max_window_layers": 2},
        {"model_type": "qwen2"} | WINDOW_64 | {"sliding_window": None},
        {"model_type": "qwen2", "layer_types": ["full_attention"] * 2} | WINDOW_64,
        {"model_type": "qwen2"} | WINDOW_64 | {"sliding_window": 1024},
    ],
)
def test_a_window_that_no_layer_uses_or_that_holds_everything_is_none(
    tmp_path: Path, windows: dict[str, object]
) -> None:
    path = str(copied(tmp_path, **windows))
    assert read_model_facts(EngineConfig(model=path)).num_positions == 1024


def test_a_rope_without_scaling_reaches_no_further() -> None:
    config = EngineConfig(
        model=str(checkpoint()), rope_scaling={"rope_type": "default", "factor": 4.0}
    )
    assert read_model_facts(config).num_positions == 1024
