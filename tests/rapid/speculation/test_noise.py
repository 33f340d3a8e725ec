"""Position-keyed noise: a function of its key, uniform, and a race that follows its weights."""

from __future__ import annotations

import numpy as np
import pytest

from rapid.errors import EngineFailed
from rapid.speculation.noise import Purpose, race, uniforms


def test_the_key_alone_decides():
    first = uniforms(7, 0, 3, Purpose.RESULT, 11)
    uniforms(8, 1, 4, Purpose.DRAFT, 100)
    np.testing.assert_array_equal(first, uniforms(7, 0, 3, Purpose.RESULT, 500)[:11])
    for other in [(8, 0, 3, Purpose.RESULT), (7, 1, 3, Purpose.RESULT), (7, 0, 4, Purpose.RESULT),
                  (7, 0, 3, Purpose.DRAFT), (-7, 0, 3, Purpose.RESULT)]:  # fmt: skip
        assert not np.array_equal(first, uniforms(*other, 11))


def test_seeded_answers_stay_what_they_were():
    """Fails when the generator changes: then every stored seed means another answer."""
    np.testing.assert_allclose(
        uniforms(1, 2, 3, Purpose.ACCEPT, 3),
        [0.8371780774161379, 0.5371985763401781, 0.14238449687613147],
    )


def test_a_race_follows_its_weights():
    probs = np.array([0.5, 0.0, 0.3, 0.2])
    wins = np.zeros(4)
    for position in range(20_000):
        wins[race(probs, uniforms(0, 0, position, Purpose.RESULT, 4))] += 1
    # 4 standard errors of a binomial share at 20,000 draws; the draws are fixed by the seed
    np.testing.assert_allclose(wins / wins.sum(), probs, atol=4 * 0.5 / 20_000**0.5)
    assert wins[1] == 0


def test_a_weight_close_to_zero_never_wins_and_warns_of_nothing():
    """At a low temperature most tokens have such a weight."""
    probs = np.array([5e-324, 1e-308, 1.0, 2.1e-307])
    for position in range(100):
        assert race(probs, uniforms(0, 0, position, Purpose.RESULT, 4)) == 2


@pytest.mark.parametrize("weight", [0.0, np.nan])
def test_a_race_that_nobody_can_win_is_an_error(weight):
    with pytest.raises(EngineFailed, match="not numbers"):
        race(np.full(3, weight), uniforms(0, 0, 0, Purpose.RESULT, 3))


def test_every_bit_of_a_seed_counts():
    seeds = [0, *(1 << bit for bit in range(64))]
    first = {float(uniforms(seed, 0, 0, Purpose.RESULT, 1)[0]) for seed in seeds}
    assert len(first) == len(seeds)
