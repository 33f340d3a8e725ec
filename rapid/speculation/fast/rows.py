"""A row of logits on a CPU, of which only the probabilities that are asked for are computed."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rapid.messages import Float32Array
from rapid.speculation.noise import Float64Array

Ids = npt.NDArray[np.int64]

# Relative error of a sum of float32 weights. Rounding an exponent a by a share d of it changes the
# sum by a share of d * E[a], at most the logarithm of the vocabulary's size, as the entropy is; the
# rest is torch's addition in cascades. `top_p` and the odds of `adaptive` take the sum in float64.
_COARSE = 2e-5
FINE = 1e-12  # the same in float64, and of two quotients that are compared
OF_PEAK = 1e-15  # rounding of logits over T, in shares of the highest
MOST_ERROR = 1e-3  # relative; above it nothing is sure
_SLICE = 64  # parts of a row, of whose logits the highest at each place are compared

_memory = threading.local()


@dataclass(frozen=True, slots=True)
class Row:
    """The target's distribution p at one position, of which a token's probability is asked for."""

    logits: Float32Array  # z [vocab]
    temperature: float  # T of p
    peak: float  # the highest logit
    total: float  # sum of ``exp((z - peak) / T)``
    error: float  # bound of the relative error of p
    rounding: float  # bound of the relative error of quotients of two probabilities

    @classmethod
    def read(cls, logits: torch.Tensor, temperature: float, *, is_fine: bool) -> Row:
        """Read a row, float32 on the CPU [vocab]; of what is no number the error is infinite."""
        array: Float32Array = logits.numpy()
        best = int(array.argmax())
        peak = float(array[best])
        rounding = FINE + OF_PEAK * abs(peak) / temperature
        if not math.isfinite(peak):
            return cls(array, temperature, peak, 1.0, math.inf, rounding)
        weights = torch.from_numpy(_room(len(array), np.float64 if is_fine else np.float32))
        if is_fine:
            weights.copy_(logits)
            if temperature != 1:  # rounded as in the specification
                weights /= temperature
            weights -= peak / temperature
        else:
            torch.sub(logits, peak, out=weights)
            if temperature != 1:
                weights /= temperature
        total = float(weights.exp_().sum())
        error = rounding if is_fine else _COARSE + rounding
        return cls(array, temperature, peak, total, error, rounding)

    def probs(self, ids: Ids) -> Float64Array:
        """Return p of some tokens, whose quotients are the specification's up to rounding."""
        scaled = self.logits[ids].astype(np.float64) / self.temperature
        scaled -= self.peak / self.temperature
        weights: Float64Array = np.exp(scaled, out=scaled)
        weights /= self.total
        return weights

    def logit_of(self, prob: float) -> np.float32:
        """Return a logit just below that of a token whose p is `prob`."""
        above = self.temperature * (math.log(max(prob * self.total, 1e-300)) - MOST_ERROR)
        return np.float32(self.peak + above - 1e-6 * abs(self.peak + above))

    def at_least(self, prob: float) -> Ids:
        """Return all tokens whose p is at least `prob`, and a few just below it, by their ids."""
        return np.flatnonzero(self.logits >= self.logit_of(prob))

    def highest(self, count: int) -> Ids:
        """Return tokens among which the `count` highest logits are, by their ids."""
        width = len(self.logits) // _SLICE
        if count >= width:
            return np.arange(len(self.logits))
        slices = self.logits[: width * _SLICE].reshape(_SLICE, width).max(axis=0)
        return np.flatnonzero(self.logits >= np.partition(slices, -count)[-count])


def _room(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return memory of this thread to compute in; touching new pages takes longer than summing."""
    rooms: dict[Any, npt.NDArray[Any]] = _memory.__dict__
    name = np.dtype(dtype).name
    if name not in rooms or len(rooms[name]) < size:
        rooms[name] = np.empty(size, dtype)
    return rooms[name][:size]
