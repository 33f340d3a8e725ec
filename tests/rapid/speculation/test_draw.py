"""The value that says how, and for which place, a token is drawn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.speculation.draw import Draw
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
