"""The weights of a GGUF file are what transformers reads from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from rapid.checkpoints.gguf import read_header, read_settings
from rapid.config import EngineConfig
from rapid.engines.forward.weights.gguf_weights import read_weights
from rapid.engines.forward.weights.loading import LoadedModel, load_model
from rapid.errors import ConfigurationError
from tests.rapid import tiny_gguf


def loaded(path: Path, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), device="cpu", **settings))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_numbers_that_are_not_quantized_are_the_models_own(tmp_path: Path, family: str) -> None:
    ours = loaded(tiny_gguf.write(tmp_path / "m.gguf", family))
    want = tiny_gguf.model(family).state_dict()
    got = ours.model.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    config, wanted = ours.model.config, tiny_gguf.model(family).config
    assert config.rope_parameters == wanted.rope_parameters
    assert config.rms_norm_eps == pytest.approx(wanted.rms_norm_eps)
    assert ours.eos_ids == {wanted.eos_token_id}


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_quantized_numbers_are_what_transformers_reads(tmp_path: Path, kind: Kind) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", kind=kind)
    want = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    got = read_weights(read_header(str(path)), read_settings(str(path)), torch.float32)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_the_dtype_is_the_configured_one(tmp_path: Path) -> None:
    model = loaded(tiny_gguf.write(tmp_path / "m.gguf", kind=Kind.Q8_0), dtype="bfloat16")
    assert {each.dtype for each in model.model.parameters()} == {torch.bfloat16}
    assert model.vocab_size == len(tiny_gguf.TOKENS)
    assert model.embedding_rows == len(tiny_gguf.TOKENS + tiny_gguf.PADDING)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": "blk.1.ffn_up"}, r"does not hold model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            {"extra": {"blk.0.ffn_gate_exps.weight": np.ones((2, 32), np.float32)}},
            "holds the tensor blk.0.ffn_gate_exps.weight, which a llama model",
        ),
        (
            {"without": "output_norm", "extra": {"output_norm.weight": np.ones(64, np.int8)}},
            "output_norm.weight is stored as I8, which cannot be dequantized",
        ),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", **changes)
    with pytest.raises(ConfigurationError, match=message) as refused:
        loaded(path)
    assert "\n" not in str(refused.value)
