"""What a config.json means for the shape of a model: as transformers' classes have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from rapid.planning.families import FAMILIES, expert_layers, refusal, sliding_layers, window_of
from rapid.planning.gpus import GPUS
from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.plan import Replica, group_sizes
from rapid.planning.shapes import ModelShape
from tests.rapid.tiny_families import EXPERTS, MORE_FAMILIES, SWITCHED_ON

MIXTURE = KNOWN_SHAPES["qwen3-30b-a3b"][1]
SLIDING = KNOWN_SHAPES["gemma-3-1b"][1]

# Settings as published files have them, with everything else left to its default.
FILES: list[dict[str, Any]] = [
    *({"model_type": family} for family in FAMILIES),
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "phi3", "sliding_window": 2047},
    {"model_type": "qwen2"} | SWITCHED_ON,
    {"model_type": "qwen3", "use_sliding_window": True, "num_hidden_layers": 30},
    {"model_type": "qwen3_moe"} | SWITCHED_ON,
    {"model_type": "gemma3_text", "sliding_window_pattern": 3, "sliding_window": 512},
]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_windows_are_those_that_transformers_gives_the_layers(file: dict[str, Any]) -> None:
    settings = {"num_hidden_layers": 8} | file
    config = AutoConfig.for_model(**settings)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * 8
    slides = [window is not None and name == "sliding_attention" for name in types]
    assert window_of(settings) == window
    assert sliding_layers(settings) == slides
    assert sliding_layers(config.to_dict()) == slides


@pytest.mark.parametrize("family", MORE_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_has_as_many_parameters_as_transformers_makes(family: str, tied: bool) -> None:
    config_class, model_class, own = MORE_FAMILIES[family]
    config = config_class(
        vocab_size=104, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=None,
        tie_word_embeddings=tied, **own,
    )  # fmt: skip
    made = model_class(config).num_parameters()
    assert ModelShape.of(config.to_dict()).num_parameters == made


def test_layers_of_experts_are_counted_as_transformers_makes_them() -> None:
    settings = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2}
    assert expert_layers(settings) == [False, True] * 3
    assert expert_layers(settings | {"mlp_only_layers": [3]})[3] is False
    model = MORE_FAMILIES["qwen3_moe"][1](
        AutoConfig.for_model(
            **settings, mlp_only_layers=[3], hidden_size=8, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=8, intermediate_size=8, **EXPERTS,
        )
    )  # fmt: skip
    made = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert made == expert_layers(settings | {"mlp_only_layers": [3]})


def test_supported_families_are_not_refused() -> None:
    assert not any(map(refusal, FAMILIES))
    assert refusal(None) == f"supported are {', '.join(FAMILIES)}"


def test_a_step_of_one_row_reads_the_experts_that_it_chose_and_many_rows_read_nearly_all() -> None:
    assert MIXTURE.active_weights < MIXTURE.layer_weights / 10
    assert MIXTURE.read_bytes() == pytest.approx(2 * MIXTURE.weights)
    everything = 2 * (MIXTURE.layer_weights + MIXTURE.head_weights)
    assert 0.35 * everything < MIXTURE.read_bytes(rows=8) < 0.5 * everything
    assert MIXTURE.read_bytes(rows=512) == pytest.approx(everything)


def test_a_mixture_is_split_over_gpus_unless_it_is_quantized() -> None:
    replica = Replica(MIXTURE, GPUS["h100-sxm"], 8192, num_gpus=4)
    assert replica.num_at_once == 4
    assert replace(replica, layer_bits=8).num_at_once == 1


def test_gpt_oss_120b_takes_the_memory_of_four_gpus() -> None:
    shape = KNOWN_SHAPES["gpt-oss-120b"][1]
    assert group_sizes(Replica(shape, GPUS["h100-sxm"], 131072), 4) == [4, 8]


def test_sliding_layers_read_and_attend_to_their_window_only() -> None:
    full = SLIDING.model_copy(update={"sliding_layers": 0, "window": 0})
    assert SLIDING.kv_read_bytes(512) == full.kv_read_bytes(512)
    read = (4 * 131072 + 22 * 512) / (26 * 131072)
    assert SLIDING.kv_read_bytes(131072) == pytest.approx(read * full.kv_read_bytes(131072))
    attention = [
        shape.decode_flops(1, 131072) - shape.decode_flops(1, 0) for shape in (SLIDING, full)
    ]
    assert attention[0] == pytest.approx(read * attention[1])


def test_prefill_counts_the_pairs_within_the_window() -> None:
    small = SLIDING.model_copy(update={"window": 3})
    pairs = {"sliding": 1 + 2 + 3 + 3 + 3, "full": 1 + 2 + 3 + 4 + 5}
    work = 4 * small.heads * small.head_dim * (22 * pairs["sliding"] + 4 * pairs["full"])
    weights = 2 * (5 * small.layer_weights + small.head_weights)
    assert small.prefill_flops(5) == pytest.approx(weights + work)


def test_sliding_layers_keep_a_ring_for_each_sequence_however_long_it_is() -> None:
    full = SLIDING.model_copy(update={"sliding_layers": 0, "window": 0})
    kept = []
    for context in (1024, 8192, 32768, 131072):
        slides, pages = (Replica(shape, GPUS["h200"], context) for shape in (SLIDING, full))
        kept.append(slides.kv_of(3) / pages.kv_of(3))
        assert slides.kv_of(3) == pytest.approx(3 * slides.kv_per_sequence)
        assert slides.max_sequences >= pages.max_sequences
    assert kept[0] == 1.0
    assert kept[1:] == pytest.approx([0.370, 0.238, 0.175], abs=1e-3)
