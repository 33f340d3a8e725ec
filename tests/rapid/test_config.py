"""Settings that cannot work are refused when they are made."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rapid.config import EngineConfig, SamplingConfig


@pytest.mark.parametrize("device", ["mps", "mps:0", "warp:3", ""])
def test_devices_that_cannot_judge_are_refused(device: str) -> None:
    with pytest.raises(ValidationError, match="use auto, balanced, cpu, cuda or cuda:0"):
        EngineConfig(model="embedded:target", device=device)


def test_settings_are_immutable_and_closed_and_keep_their_values_out_of_errors() -> None:
    sampling = SamplingConfig(temperature=0.5)
    with pytest.raises(ValidationError, match="frozen"):
        sampling.temperature = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs") as refused:
        SamplingConfig(api_key="SECRET")  # type: ignore[call-arg]
    assert "SECRET" not in str(refused.value)


def test_a_temperature_too_low_to_divide_by_is_greedy() -> None:
    assert SamplingConfig(temperature=0.99e-5).temperature == 0
    assert SamplingConfig(temperature=1e-5).temperature == 1e-5


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"disk_cache_folder": "kv"}, "belong together"),
        ({"disk_cache_gib": 1.0}, "belong together"),
        ({"disk_cache_folder": "kv", "disk_cache_gib": 1.0}, "set host_cache_tokens too"),
    ],
)
def test_a_disk_tier_that_cannot_be_is_refused(setting: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        EngineConfig(model="m", **setting)


@pytest.mark.parametrize(
    "setting", [{"quantization": {"load_in_4bit": True}}, {"device": "balanced"}]
)
def test_deterministic_engines_have_whole_weights_on_one_device(
    setting: dict[str, object],
) -> None:
    EngineConfig(model="m", **setting)
    EngineConfig(model="m", deterministic=True)
    EngineConfig(model="m", deterministic=True, quantization="int4")
    with pytest.raises(ValidationError, match="neither quantized by transformers nor spread"):
        EngineConfig(model="m", deterministic=True, **setting)
