"""What is packed in few bits, and the bits of a weight with its share of the scales."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rapid.planning.known_models import KNOWN_SHAPES
from rapid.planning.packed_bits import (
    CONVERTED,
    StoredBits,
    find_ungrouped,
    group_of,
    layer_bits,
    layer_bits_of,
    unpackable,
    unpacking_bytes,
)

SHAPES = {name: shape for name, (_, shape) in KNOWN_SHAPES.items()}
DENSE = [name for name, shape in SHAPES.items() if not shape.experts]


def test_groups_are_the_largest_that_divide_the_columns() -> None:
    assert [group_of(n) for n in (64, 128, 192, 576, 8192)] == [64, 128, 64, 64, 128]


@pytest.mark.parametrize("name", DENSE)
def test_all_known_dense_models_can_be_packed_whole_and_in_two_parts(name: str) -> None:
    assert unpackable(SHAPES[name]) is None
    if SHAPES[name].find_undivided(2) is None:
        assert unpackable(SHAPES[name].part_of(2)) is None


def test_what_cannot_be_packed_is_named() -> None:
    assert unpackable(SHAPES["qwen2.5-72b"].part_of(4)) == "7392 rows of the MLP"
    shape = SHAPES["llama-3.1-8b"]
    assert unpackable(shape.model_copy(update={"hidden": 4100})) == "4100 columns"
    assert unpackable(shape.model_copy(update={"kv_heads": 1, "head_dim": 80})) == "80 rows of keys"


def test_a_scale_and_a_middle_of_128_columns_are_a_quarter_of_a_bit() -> None:
    assert layer_bits(SHAPES["llama-3.1-70b"]) == 4.25
    columns_of_64 = SHAPES["llama-3.1-8b"].model_copy(update={"hidden": 64 * 63})
    assert 4.25 < layer_bits(columns_of_64) < 4.5


def test_few_weights_are_converted_at_once() -> None:
    assert unpacking_bytes(SHAPES["llama-3.1-70b"]) == 6 * CONVERTED["cuda"]
    small = SHAPES["llama-3.2-1b"]
    assert unpacking_bytes(small) == 6 * small.hidden * 2 * small.intermediate


COMPRESSED = "compressed-tensors"
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ: dict[str, Any] = AWQ | {"quant_method": "gptq", "desc_act": False}


def scheme(stored_as: str, rows: object = None, **weights: object) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "input_activations": rows}}
    return {"quant_method": COMPRESSED, "format": stored_as, "config_groups": groups}


INTEGERS = scheme("pack-quantized", num_bits=4, strategy="group", group_size=128)
FP8 = scheme("float-quantized", {"dynamic": True}, num_bits=8, strategy="channel")


@pytest.mark.parametrize(
    ("settings", "stored", "said"),
    [
        (AWQ, StoredBits("awq", 4, 128), "awq, 4 bits in groups of 128"),
        (AWQ | {"version": "GEMM", "group_size": 64}, StoredBits("awq", 4, 64), "of 64"),
        (GPTQ, StoredBits("gptq", 4, 128, 1), "gptq, 4 bits in groups of 128"),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, StoredBits("gptq", 4, 128), "gptq, 4 bits"),
        (GPTQ | {"group_size": -1}, StoredBits("gptq", 4, None, 1), "with a scale for each row"),
        (INTEGERS, StoredBits(COMPRESSED, 4, 128), "compressed-tensors, 4 bits in groups"),
        (FP8, StoredBits(COMPRESSED, 8, None), "fp8 with a scale for each row"),
    ],
)
def test_what_a_published_checkpoint_says_of_its_weights(
    settings: dict[str, Any], stored: StoredBits, said: str
) -> None:
    assert StoredBits.of(settings) == stored
    assert said in str(stored)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (AWQ | {"bits": 8}, "its weights have 8 bits, and 4 are packed"),
        (AWQ | {"version": "gemv"}, "AWQ's version 'gemv'"),
        (AWQ | {"zero_point": False}, "no zero points"),
        (AWQ | {"group_size": 48}, "groups have 48 columns, and multiples of 32"),
        (GPTQ | {"bits": 3}, "its weights have 3 bits"),
        (GPTQ | {"desc_act": True}, "order of activations \\(desc_act\\)"),
        (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "quantized differently"),
        (GPTQ | {"checkpoint_format": "marlin"}, "its checkpoint_format is 'marlin'"),
        (scheme("nvfp4-pack-quantized", num_bits=4, strategy="group"), "format is 'nvfp4"),
        (scheme("pack-quantized", num_bits=8, strategy="channel"), "have 8 bits by 'channel'"),
        (
            scheme(
                "pack-quantized", num_bits=4, strategy="group", group_size=128, actorder="group"
            ),
            "order of activations \\(actorder: group\\)",
        ),
        (scheme("float-quantized", num_bits=8, strategy="block"), "scales by 'block'"),
        (
            scheme("float-quantized", {"dynamic": False}, num_bits=8, strategy="tensor"),
            "its activations have fixed scales",
        ),
        (FP8 | {"config_groups": FP8["config_groups"] | {"more": {}}}, "2 kinds of quantized"),
    ],
)
def test_what_is_not_packed_is_said(settings: dict[str, Any], why: str) -> None:
    found = StoredBits.of(settings)
    assert isinstance(found, str)
    assert re.search(why, found)


def test_a_share_of_a_published_group_is_a_group() -> None:
    stored = StoredBits("gptq", 4, 128)
    assert [stored.group_for(n) for n in (1024, 576, 224)] == [128, 64, 32]
    assert StoredBits("gptq", 4, 32).group_for(1024) == 32
    assert StoredBits("gptq", 4, None).group_for(576) == 64
    llama, qwen = SHAPES["llama-3.1-8b"], SHAPES["qwen2.5-7b"]
    assert find_ungrouped(llama, stored) is None
    assert find_ungrouped(qwen, StoredBits("awq", 4, 256)) is None
    assert find_ungrouped(qwen, StoredBits("awq", 4, 1024)) == "3584 columns"


def test_a_published_weight_has_its_bits_and_its_share_of_the_scales() -> None:
    shape = SHAPES["llama-3.1-70b"]
    assert layer_bits_of(shape, StoredBits("awq", 4, 128)) == 4.25
    assert layer_bits_of(shape, StoredBits("awq", 4, 32)) == 5
    assert layer_bits_of(shape, StoredBits("gptq", 4, None)) == 4.25  # no longer one is packed
    assert 8 < layer_bits_of(shape, StoredBits(COMPRESSED, 8, None)) < 8.01
