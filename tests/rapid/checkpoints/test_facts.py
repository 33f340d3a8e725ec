"""How far a model reaches, from its ``config.json`` alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
    [{"sliding_window": 64}, {"model_type": "qwen2", "sliding_window": 64, "layer_types": LAYERS}],
)
def test_a_window_that_the_family_has_not_or_that_is_switched_off_is_refused(
    tmp_path: Path, windows: dict[str, object]
) -> None:
    path = str(copied(tmp_path, **windows))
    with pytest.raises(ConfigurationError, match="its family has none or they are switched off"):
        read_model_facts(EngineConfig(model=path))


@pytest.mark.parametrize(
    ("windows", "sliding"),
    [
        ({"model_type": "qwen2"} | WINDOW_64, 1),
        ({"model_type": "qwen3"} | WINDOW_64 | {"max_window_layers": 0}, 2),
        ({"model_type": "qwen2", "layer_types": LAYERS} | WINDOW_64, 1),
        ({"model_type": "mistral", "sliding_window": 64}, 2),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, 1),
    ],
)
def test_layers_with_a_window_reach_as_far_as_the_others(
    tmp_path: Path, windows: dict[str, object], sliding: int
) -> None:
    facts = read_model_facts(EngineConfig(model=str(copied(tmp_path, **windows))))
    assert (facts.shape.sliding_layers, facts.shape.window) == (sliding, 64)
    assert facts.num_positions == 1024


@pytest.mark.parametrize("window", ["wide", 0])
def test_a_window_that_is_no_number_is_refused(tmp_path: Path, window: object) -> None:
    path = str(copied(tmp_path, model_type="qwen2", **WINDOW_64 | {"sliding_window": window}))
    with pytest.raises(ConfigurationError, match=f"sliding windows of {window!r} tokens"):
        read_model_facts(EngineConfig(model=path))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "recurrent layers, whose state cannot go back"),
        ("qwen3_5_moe", "recurrent layers, whose state cannot go back"),
        ("jamba", "recurrent layers"),
        ("mamba2", "recurrent layers"),
        ("deepseek_v3", "multi-head latent attention"),
        ("gemma2", "caps the scores"),
        ("mixtral", "only Qwen3's"),
        ("llama4", "images as well"),
        ("gpt2", "supported are llama, mistral"),
    ],
)
def test_other_architectures_are_refused_by_name_with_the_reason(
    tmp_path: Path, family: str, reason: str
) -> None:
    path = str(copied(tmp_path, model_type=family))
    with pytest.raises(ConfigurationError, match=f"family {family!r}, which cannot .*{reason}"):
        read_model_facts(EngineConfig(model=path))


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    changes = {"model_type": "gemma3_text", "use_bidirectional_attention": True}
    with pytest.raises(ConfigurationError, match="attends to later tokens"):
        read_model_facts(EngineConfig(model=str(copied(tmp_path, **changes))))


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def test_longrope_takes_the_factors_of_the_longest_sequence(tmp_path: Path) -> None:
    long = LONG | {"original_max_position_embeddings": 128}
    path = str(copied(tmp_path, rope_parameters=None, rope_scaling=long))
    for max_context, factor in ((None, 2.0), (129, 2.0), (128, 1.0)):
        rope = read_model_facts(EngineConfig(model=path, max_context=max_context)).rope_override
        assert rope is not None
        assert rope["short_factor"] == rope["long_factor"] == [factor] * 8


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi_names_its_longrope_otherwise_and_its_original_length_beside_it(
    tmp_path: Path, name: str
) -> None:
    changes = {"model_type": "phi3", "original_max_position_embeddings": 64}
    long = LONG | {"rope_type": name}
    path = copied(tmp_path, rope_parameters=None, rope_scaling=long, **changes)
    rope = read_model_facts(EngineConfig(model=str(path), max_context=64)).rope_override
    assert rope is not None
    assert (rope["rope_type"], rope["long_factor"][0]) == ("longrope", 1.0)


def test_dynamic_scaling_ends_where_it_would_begin_to_change_keys(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    facts = read_model_facts(EngineConfig(model=str(copied(tmp_path, rope_parameters=dynamic))))
    assert (facts.num_positions, facts.rope_override) == (1024, {"rope_type": "default"})


def test_sliding_layers_may_not_have_a_rope_that_depends_on_the_length(tmp_path: Path) -> None:
    ropes = {"full_attention": {}, "sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}
    path = copied(tmp_path, model_type="gemma3_text", rope_parameters=ropes)
    with pytest.raises(ConfigurationError, match="'dynamic' of sliding layers is not supported"):
        read_model_facts(EngineConfig(model=str(path)))


@pytest.mark.parametrize(
    "windows",
    [
        {"sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 64},
        {"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": False},
        {"model_type": "qwen2"} | WINDOW_64 | {"max_window_layers": 2},
        {"model_type": "qwen2"} | WINDOW_64 | {"sliding_window": None},
        {"model_type": "qwen2", "layer_types": ["full_attention"] * 2} | WINDOW_64,
    ],
)
def test_a_window_that_no_layer_uses_is_none(tmp_path: Path, windows: dict[str, object]) -> None:
    shape = read_model_facts(EngineConfig(model=str(copied(tmp_path, **windows)))).shape
    assert (shape.sliding_layers, shape.window) == (0, 0)


def test_a_rope_without_scaling_reaches_no_further() -> None:
    config = EngineConfig(
        model=str(checkpoint()), rope_scaling={"rope_type": "default", "factor": 4.0}
    )
    assert read_model_facts(config).num_positions == 1024


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WIDE = {"hidden_size": 128, "head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 384}


@pytest.mark.parametrize(
    ("quantization", "changes", "setting", "sentence"),
    [
        ({"quant_method": "fp9"}, {}, {}, "stored quantized by 'fp9', which is not known: take"),
        (BLOCKS, {}, {"tensor_parallel": 2}, "by 'fp8', which tensor_parallel does not split"),
        (BLOCKS, {}, {"quantization": "fp8"}, "stored quantized: leave quantization out"),
        (BLOCKS, {}, {"quantization": {"load_in_4bit": True}}, "leave quantization out"),
        (AWQ, {}, {"quantization": {"quant_method": "awq"}}, "leave quantization out"),
        (AWQ, {}, {"device": "balanced"}, "(awq), which is not for layers that accelerate places"),
        (AWQ | {"bits": 8}, {}, {}, "(awq), but its weights have 8 bits, and 4 are packed: take"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            {},
            {},
            "has a quantization_config that cannot be read: KeyError('config_groups')",
        ),
        (
            AWQ | {"group_size": 256},
            {},
            {},
            "has 128 columns, which its groups of 256 do not divide: take another checkpoint",
        ),
        (
            AWQ,
            {"intermediate_size": 416},
            {},
            "has 416 rows of the MLP, and weights of 4 bits are in 64 together",
        ),
        (AWQ, {}, {"tensor_parallel": 4}, "has 32 rows of queries of each process"),
        (
            AWQ,
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 64, "sliding_window": None},
            {},
            "which is not built for weights that are stored quantized (awq, 4 bits in groups of",
        ),
    ],
)  # fmt: skip
def test_a_quantized_checkpoint_is_refused_at_the_door(
    tmp_path: Path,
    quantization: dict[str, Any],
    changes: dict[str, Any],
    setting: dict[str, Any],
    sentence: str,
) -> None:
    path = copied(tmp_path, quantization_config=quantization, **WIDE | changes)
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        read_model_facts(EngineConfig(model=str(path), dtype="bfloat16", **setting))


def test_the_first_name_of_compressed_tensors_settings_is_known(tmp_path: Path) -> None:
    groups = {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    path = copied(tmp_path, compression_config=settings | {"config_groups": groups}, **WIDE)
    stored = read_model_facts(EngineConfig(model=str(path))).stored
    assert str(stored) == "compressed-tensors, fp8 with a scale for each row"


def test_what_transformers_reads_is_left_to_it(tmp_path: Path) -> None:
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path = str(copied(tmp_path, quantization_config=quantization, **WIDE))
    facts = read_model_facts(EngineConfig(model=path, quantization={"load_in_4bit": True}))
    assert (facts.stored, facts.quantization) == (None, quantization)
