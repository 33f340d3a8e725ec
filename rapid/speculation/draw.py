"""Settings and position of a token: with the logits they determine it, on any engine.

The numbers of all tokens come from numpy's Philox 4x64-10; those of a few chosen tokens are
computed alone, with the same bits (Salmon et al., SC 2011, figure 2, with the constants of their
Random123 library), in words of 64 bits whose products are put together from halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rapid.speculation.noise import Float64Array, Purpose, generator, uniforms

if TYPE_CHECKING:
    from rapid.config import SamplingConfig, SpeculationConfig

Keys = npt.NDArray[np.int64]
Words = npt.NDArray[np.int64]

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)  # of Philox 4x64 (Random123)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)  # increments of its key, likewise
_ROUNDS = 10  # as in numpy
_LOW = 0xFFFFFFFF  # the lower half of a word
_MASK_53 = 2**53 - 1  # the bits of a uniform number
_MASK_64 = 2**64 - 1  # a word of counter and key


@dataclass(frozen=True, slots=True)
class Draw:
    """The settings and position with which one token is proposed, judged or decoded."""

    sampling: SamplingConfig  # temperature, filters and seed of the request
    speculation: SpeculationConfig  # settings of the method
    choice: int  # index of the request's answer
    position: int  # generated position of the token

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a random one."""
        return self.sampling.temperature == 0

    @property
    def temperature(self) -> float:
        """The temperature of p, q and p_hat: a greedy request's is `transfer_temperature`."""
        return self.sampling.temperature or self.speculation.transfer_temperature

    @property
    def filters(self) -> tuple[int | None, float, float]:
        """The request's `top_k`, `top_p` and `min_p`, as `filter_probs` takes them."""
        return self.sampling.top_k, self.sampling.top_p, self.sampling.min_p

    def after(self, num_tokens: int) -> Draw:
        """Return the draw of the token that follows this one by `num_tokens` positions."""
        return Draw(self.sampling, self.speculation, self.choice, self.position + num_tokens)

    def noise(self, purpose: Purpose, count: int) -> Float64Array:
        """Return uniform numbers in (0, 1) for one decision, one per token id [count]."""
        return uniforms(self.sampling.seed, self.choice, self.position, purpose, count)

    def generator(self, purpose: Purpose) -> np.random.Philox:
        """Return the generator of the words that these numbers are made of."""
        return generator(self.sampling.seed, self.choice, self.position, purpose)


def keys_of(draws: Sequence[Draw], purpose: Purpose) -> Keys:
    """Return the keys of some decisions: position, seed, and choice with purpose [draws, 3]."""
    return np.array(
        [
            (draw.position, _to_signed(draw.sampling.seed), draw.choice << 8 | purpose)
            for draw in draws
        ],
        dtype=np.int64,
    )


def uniforms_at(keys: Keys, ids: npt.NDArray[Any]) -> Float64Array:
    """Return the numbers that `Draw.noise` gives to token ids, both [draws, n], on the host."""
    ids = ids.astype(np.int64)
    words = np.stack(_philox(ids // 4 + 1, *_columns(keys)), axis=-1)
    chosen = np.take_along_axis(words, (ids % 4)[..., None], axis=-1)[..., 0]
    return ((chosen >> 11 & _MASK_53).astype(np.float64) + 0.5) * 2.0**-53


def _columns(keys: Words) -> tuple[Words, Words, Words]:
    return keys[:, 0, None], keys[:, 1, None], keys[:, 2, None]


def _to_signed(word: int) -> int:
    """Return the signed number with the same 64 bits."""
    word &= _MASK_64
    return word - 2**64 if word >= 2**63 else word


def _philox(counter: Words, position: Words, seed: Words, choice: Words) -> list[Words]:
    """Return the four words at each counter, whose other words are the position and zeros."""
    zero = counter * 0
    c0, c1, c2, c3 = counter, position + zero, zero, zero
    for i in range(_ROUNDS):
        key0, key1 = seed + _to_signed(i * _WEYL[0]), choice + _to_signed(i * _WEYL[1])
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
    return [c0, c1, c2, c3]


def _product(word: Words, factor: int) -> tuple[Words, Words]:
    """Return the upper and the lower 64 bits of an unsigned product."""
    word_low, word_high = word & _LOW, word >> 32 & _LOW
    low, high = factor & _LOW, factor >> 32
    middle = word_high * low + (word_low * low >> 32 & _LOW)
    other = word_low * high + (middle & _LOW)
    upper = word_high * high + (middle >> 32 & _LOW) + (other >> 32 & _LOW)
    return upper, word * _to_signed(factor)
