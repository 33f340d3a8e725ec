"""Random numbers that are a function of their use, never of the order in which they are drawn.

Philox is counter-based (Salmon et al., SC 2011): the key is (seed, choice and purpose), the counter
is (token id, position). So drafter and target share noise without communication.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rapid.errors import EngineFailed

Float64Array = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

NOT_NUMBERS = "the logits are not numbers: no token can be chosen by them"

_MASK_64 = 2**64 - 1  # a word of a Philox generator's key


class Purpose(IntEnum):
    """The decision that a random number is for; the values are part of every seeded answer."""

    # They must never be renumbered.
    RESULT = 0  # the answer's token: plain decoding, and both sides under `shared_noise`
    DRAFT = 1  # the drafter's token under `maximal`
    ACCEPT = 2  # accept or reject under `maximal`
    RESIDUAL = 3  # the token after a rejection under `maximal`


def uniforms(seed: int, choice: int, position: int, purpose: Purpose, count: int) -> Float64Array:
    """Return numbers in (0, 1), one per token id [count], of 53 random bits each."""
    return numbers(generator(seed, choice, position, purpose).random_raw(count))


def generator(seed: int, choice: int, position: int, purpose: Purpose) -> np.random.Philox:
    """Return the generator of the words that numbers are made of, in the order of token ids."""
    return np.random.Philox(
        key=np.array([seed & _MASK_64, choice << 8 | purpose], dtype=np.uint64),
        counter=np.array([0, position, 0, 0], dtype=np.uint64),
    )


def numbers(raw: Words) -> Float64Array:
    """Return the numbers of some words, whose memory they may use."""
    raw >>= np.uint64(11)  # in place: with a long vocabulary memory traffic takes most of the time
    result = raw.astype(np.float64)
    result += 0.5
    result *= 2.0**-53
    return result


def accepts(probability: float, uniform: float) -> bool:
    """Return True with `probability`, decided by a uniform number in (0, 1)."""
    return bool(uniform < probability)


def race(probs: Float64Array, noise: Float64Array) -> int:
    """Draw an index from weights [n] that need not sum to one, by uniform numbers of the same [n].

    ``argmin_x E_x / p(x)`` with ``E_x ~ Exp(1)`` follows p: an exponential race, which is
    Gumbel-max (``argmax_x log p(x) + g_x``, ``g_x = -log E_x``) without its second logarithm.

    Raises:
        EngineFailed: No weight is above zero, as when logits are not numbers.
    """
    finish = np.full(len(probs), np.inf)
    with np.errstate(over="ignore"):  # inf is right for a weight of 1e-307, which never finishes
        np.divide(-np.log(noise), probs, out=finish, where=probs > 0)
    winner = int(finish.argmin())
    if finish[winner] == np.inf:
        raise EngineFailed(NOT_NUMBERS)
    return winner
