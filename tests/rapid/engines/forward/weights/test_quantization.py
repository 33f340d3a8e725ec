"""Quantization reaches transformers, and only if transformers knows every key."""

from __future__ import annotations

import pytest
import torch

from rapid.engines.forward.weights import loading
from rapid.engines.forward.weights.loading import load_model
from rapid.errors import ConfigurationError
from tests.rapid.tiny_models import engine_config


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What `from_pretrained` is called with, in place of quantizing (which needs a GPU)."""
    seen: dict[str, object] = {}
    real = loading.AutoModelForCausalLM.from_pretrained

    def load(source: str, **settings: object) -> torch.nn.Module:
        seen.update(settings)
        return real(source, **settings | {"quantization_config": None, "device_map": None})

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    return seen


def test_settings_reach_transformers(passed: dict[str, object]) -> None:
    settings = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}
    load_model(engine_config(quantization=settings))
    config = passed["quantization_config"]
    assert type(config).__name__ == "BitsAndBytesConfig"
    assert (config.load_in_4bit, config.bnb_4bit_compute_dtype) == (True, torch.bfloat16)
    assert passed["device_map"] == {"": torch.device("cpu")}  # never moved afterwards


def test_without_settings_nothing_is_passed(passed: dict[str, object]) -> None:
    load_model(engine_config())
    assert not {"quantization_config", "device_map"} & passed.keys()


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        ({"load_in_4bits": True}, "set load_in_4bit or load_in_8bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_typ": "nf4"}, "did you mean bnb_4bit_quant_ty"),
        ({"quant_method": "fp9"}, "quant_method to one of .*fp8"),
        ({"quant_method": "fp8", "xyz": 1}, "quantization.xyz: .* known are activation_scheme"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "half4"}, "half4"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "only one can be used"),
    ],
)
def test_what_transformers_does_not_know_is_refused(
    passed: dict[str, object], quantization: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        load_model(engine_config(quantization=quantization))
    assert "\n" not in str(caught.value)
    assert not passed, "weights were read"


def test_a_method_that_cannot_run_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise ImportError("Using `bitsandbytes` requires `pip install bitsandbytes`\nmore")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(ConfigurationError, match="cannot be loaded quantized: Using"):
        load_model(engine_config(quantization={"load_in_8bit": True}))


def test_other_failures_are_not_taken_for_those_of_quantization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(RuntimeError, match="out of luck"):
        load_model(engine_config())
