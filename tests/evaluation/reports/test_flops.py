from __future__ import annotations

import json

import pytest

from evaluation.reports.flops import of_answer, paper_alone, paper_speculative
from evaluation.systems import BASELINES
from rapid.embedded import TARGET
from rapid.planning.shapes import ModelShape
from tests.evaluation.reports.handmade import SHAPE, result

LLAMA_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128256,
)


def test_llama_8b_has_the_weights_that_it_is_named_for():
    embedding = LLAMA_8B.head_weights
    assert LLAMA_8B.layer_weights == 6_979_321_856
    assert LLAMA_8B.layer_weights + 2 * embedding == pytest.approx(8.03e9, rel=1e-3)


def test_prefill_of_128k_is_two_thirds_attention():
    tokens = 131072
    attention = 4 * 32 * 4096 * tokens * (tokens + 1) / 2
    assert LLAMA_8B.prefill_flops(tokens) == pytest.approx(6.33e15, rel=1e-3)
    assert attention / LLAMA_8B.prefill_flops(tokens) == pytest.approx(0.71, abs=0.01)


def test_a_token_over_128k_costs_five_times_its_weights():
    assert LLAMA_8B.decode_flops(1, 131072) == pytest.approx(84e9, rel=0.01)
    assert LLAMA_8B.decode_flops(1, 0) == pytest.approx(15.0e9, rel=0.01)
    assert LLAMA_8B.decode_flops(7, 131072) == 7 * LLAMA_8B.decode_flops(1, 131072)


def test_a_shape_is_read_from_a_checkpoint():
    shape = ModelShape.of(json.loads((TARGET / "config.json").read_text()))
    assert (shape.head_dim, shape.kv_heads) == (32, 2)
    assert ModelShape.of(
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 10,
        }
    ) == ModelShape(
        layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=128, vocabulary=10
    )


def test_the_paper_counts_in_its_own_way():
    assert paper_alone(8e9, 120_000, 10) == pytest.approx(1.92e16 + 8e11)
    assert paper_alone(8e9, 5_000, 10) == pytest.approx(8e14 + 8e11)
    step = 8e14 + 8e11 + 16e9 * 120_010
    assert paper_speculative(8e9, 8e9, 120_000, 5_000, 10, 0.5) == pytest.approx(2 * step)


def test_a_bonus_token_is_one_more_position_for_the_target():
    shape = ModelShape.model_validate(SHAPE)
    answer = result(0, "x", 1.0, rounds=3, drafted=12, accepted=9, by_position=((3, 3), (3, 3)))
    paper, boost = (
        of_answer(answer, BASELINES[name], shape, shape) for name in ("rapid-paper", "rapid-boost")
    )
    assert paper - boost == shape.decode_flops(3, 505)


def test_the_controls_read_with_the_models_that_they_name():
    target = ModelShape.model_validate(SHAPE)
    drafter = ModelShape.model_validate(SHAPE | {"layers": 4})
    answer = result(0, "x", 1.0, rounds=3, drafted=12, by_position=((3, 3), (3, 3)))
    boost, both, plain, alone = (
        of_answer(answer, BASELINES[name], target, drafter)
        for name in ("rapid-boost", "rag-both", "plain", "plain-drafter")
    )
    assert plain == target.prefill_flops(500) + target.decode_flops(10, 505)
    assert alone == drafter.prefill_flops(500) + drafter.decode_flops(10, 505)
    drafting = drafter.prefill_flops(100) + drafter.decode_flops(12, 105)
    assert boost == target.prefill_flops(500) + target.decode_flops(12, 505) + drafting
    assert both == target.prefill_flops(100) + target.decode_flops(12, 105) + drafting


def test_a_refresh_is_one_more_prefill_for_the_drafter():
    shape = ModelShape.model_validate(SHAPE)
    once = result(0, "x", 1.0)
    again = once.model_copy(update={"refreshes": 2})
    first, more = (of_answer(each, BASELINES["sd"], shape, shape) for each in (once, again))
    assert more - first == 2 * shape.prefill_flops(100)
