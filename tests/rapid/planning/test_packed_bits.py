"""What `quantization: int4` packs, and the bits of a weight with its share of the scales."""

from __future__ import annotations

import pytest

from rapid.planning.packed_bits import CONVERTED, group_of, layer_bits, unpackable, unpacking_bytes
from rapid.planning.shapes import KNOWN_SHAPES

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
