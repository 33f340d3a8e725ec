"""Numbers that follow from a model's shape: published ones, and those of transformers."""

from __future__ import annotations

import pytest

from rapid.engines.attention.ragged import MAX_SCORES
from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.shapes import GPU_SCORES, ModelShape
from tests.rapid.tiny_models import FAMILIES

SHAPES = {name: shape for name, (_, shape) in KNOWN_SHAPES.items()}


def near(value: float) -> object:
    return pytest.approx(value, rel=0.05)


class TestShapes:
    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-72b", 72_706_203_648),
            ("mistral-7b", 7_248_023_552),
            ("phi-4", 14_659_507_200),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-14b", 14_768_307_200),
            ("qwen3-32b", 32_762_123_264),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("gemma-3-1b", 999_885_952),
            ("gpt-oss-20b", 20_914_757_184),
            ("gpt-oss-120b", 116_829_156_672),
        ],
    )
    def test_built_in_shapes_have_the_published_number_of_parameters(self, name, parameters):
        assert SHAPES[name].num_parameters == parameters

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize(
        ("family", "settings"),
        [
            ("llama", {}),
            ("llama", {"attention_bias": True}),
            ("llama", {"mlp_bias": True}),
            ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
            ("qwen2", {}),
            ("qwen2", {"attention_bias": False, "mlp_bias": True}),  # it knows neither
            ("qwen3", {}),
            ("qwen3", {"attention_bias": True}),
        ],
    )
    def test_every_family_has_as_many_parameters_as_transformers_makes(
        self, family, settings, tied
    ):
        config_class, model_class, kv_heads = FAMILIES[family]
        config = config_class(
            vocab_size=104,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
            **{"head_dim": 16} | settings,
        )
        made = model_class(config).num_parameters()
        assert ModelShape.of(config.to_dict()).num_parameters == made

    def test_bytes_of_weights_and_keys(self):
        assert SHAPES["llama-3.1-8b"].weight_bytes() == near(16.06e9)
        assert SHAPES["llama-3.1-8b"].read_bytes() == near(15.0e9)
        assert SHAPES["llama-3.1-8b"].kv_bytes_per_token() == 128 * 1024
        assert SHAPES["llama-3.1-70b"].weight_bytes() == near(141e9)
        assert SHAPES["llama-3.1-70b"].kv_bytes_per_token() == 320 * 1024

    def test_attention_and_the_memory_plan_hold_as_many_scores(self):
        assert GPU_SCORES == MAX_SCORES
