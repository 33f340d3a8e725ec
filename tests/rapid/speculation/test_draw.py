"""The value that says how, and for which place, a token is drawn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.speculation.draw import Draw, keys_of, uniforms_at
from rapid.speculation.noise import Purpose, uniforms

METHOD = SpeculationConfig(transfer_temperature=0.5)
DRAW = Draw(SamplingConfig(temperature=0.8, seed=7), METHOD, choice=2, position=3)


def test_a_greedy_request_has_the_transfer_temperature() -> None:
    greedy = dataclasses.replace(DRAW, sampling=SamplingConfig(temperature=0))
    assert (DRAW.is_greedy, DRAW.temperature) == (False, 0.8)
    assert (greedy.is_greedy, greedy.temperature) == (True, 0.5)


@pytest.mark.parametrize("purpose", Purpose)
def test_seed_and_place_key_the_noise(purpose: Purpose) -> None:
    np.testing.assert_array_equal(DRAW.noise(purpose, 5), uniforms(7, 2, 3, purpose, 5))


def test_a_later_token_differs_in_its_position_only() -> None:
    assert DRAW.after(0) == DRAW
    assert DRAW.after(4) == dataclasses.replace(DRAW, position=7)


DRAWS = [
    Draw(SamplingConfig(seed=seed), SpeculationConfig(), choice, position)
    for seed, choice, position in [
        (0, 0, 0), (1, 2, 3), (-1, 0, 1), (2**63 - 1, 7, 131_072), (-(2**63), 255, 2**40),
        (0x5DEECE66D, 1, 2**32), (-0x123456789ABCDEF, 3, 2**32 - 1),
    ]
]  # fmt: skip
COUNT = 5_003  # not a multiple of the four numbers of a counter


def expected(purpose: Purpose) -> np.ndarray:
    return np.stack([draw.noise(purpose, COUNT) for draw in DRAWS])


@pytest.mark.parametrize("purpose", Purpose)
def test_thousands_of_counters_give_numpys_bits(purpose):
    every = np.broadcast_to(np.arange(COUNT), (len(DRAWS), COUNT))
    np.testing.assert_array_equal(uniforms_at(keys_of(DRAWS, purpose), every), expected(purpose))


def test_a_few_tokens_numbers_are_those_of_all():
    ids = np.random.default_rng(0).integers(0, COUNT, (len(DRAWS), 64))
    np.testing.assert_array_equal(
        uniforms_at(keys_of(DRAWS, Purpose.DRAFT), ids),
        np.take_along_axis(expected(Purpose.DRAFT), ids, axis=1),
    )
