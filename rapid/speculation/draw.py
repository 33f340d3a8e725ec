"""Settings and position of a token: with the logits they determine it, on any engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rapid.speculation.noise import Float64Array, Purpose, generator, uniforms

if TYPE_CHECKING:
    from rapid.config import SamplingConfig, SpeculationConfig


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

    def after(self, num_tokens: int) -> Draw:
        """Return the draw of the token that follows this one by `num_tokens` positions."""
        return Draw(self.sampling, self.speculation, self.choice, self.position + num_tokens)

    def noise(self, purpose: Purpose, count: int) -> Float64Array:
        """Return uniform numbers in (0, 1) for one decision, one per token id [count]."""
        return uniforms(self.sampling.seed, self.choice, self.position, purpose, count)

    def generator(self, purpose: Purpose) -> np.random.Philox:
        """Return the generator of the words that these numbers are made of."""
        return generator(self.sampling.seed, self.choice, self.position, purpose)
