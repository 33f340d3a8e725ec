"""Philox in integer operations: the same bits as numpy's generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rapid.config import SamplingConfig, SpeculationConfig
from rapid.speculation.draw import Draw
from rapid.speculation.fast.philox import compute_uniforms, keys_of, uniforms_at, uniforms_on_device
from rapid.speculation.noise import Purpose

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
    keys = torch.from_numpy(keys_of(DRAWS, purpose))
    np.testing.assert_array_equal(compute_uniforms(keys, COUNT).numpy(), expected(purpose))
    np.testing.assert_array_equal(uniforms_on_device(keys, COUNT).numpy(), expected(purpose))


def test_a_few_tokens_numbers_are_those_of_all():
    ids = np.random.default_rng(0).integers(0, COUNT, (len(DRAWS), 64))
    np.testing.assert_array_equal(
        uniforms_at(keys_of(DRAWS, Purpose.DRAFT), ids),
        np.take_along_axis(expected(Purpose.DRAFT), ids, axis=1),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_same_bits():
    keys = torch.from_numpy(keys_of(DRAWS, Purpose.RESULT)).cuda()
    numbers = uniforms_on_device(keys, COUNT).cpu().numpy()
    np.testing.assert_array_equal(numbers, expected(Purpose.RESULT))
