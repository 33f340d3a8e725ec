"""Keys and values in fp8: a byte for each number, and no scale.

A number of fp8 (e4m3) has four significant bits; magnitudes from 1/64 to 448 are kept to a
sixteenth, smaller ones to the next multiple of 1/512. What was rounded once is exact in every dtype
that models compute in, so whatever reads a key reads the same number.
"""

from __future__ import annotations

import torch

from rapid.errors import ConfigurationError

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of fp8; larger numbers are kept as this one
CAPABILITY = (8, 9)  # the least of a GPU that converts fp8

_SIGN_AND_DIGITS = -0x78100000  # of fp8 in the upper bits of float32, 0x87F00000 as an int32
_EXPONENT = 2.0**120  # what an exponent of fp8 lacks in the place of one of float32


def check_device(device: torch.device) -> None:
    """Raise ConfigurationError unless KV in fp8 can be read on a device."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ConfigurationError(
            "kv_cache_dtype: fp8 needs a GPU of compute capability 8.9 or later (L4, H100): leave "
            "it out"
        )


def to_fp8(numbers: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers of fp8."""
    return numbers.clamp(-LARGEST, LARGEST).to(FP8)


def from_fp8(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of fp8 in another dtype, in which they are exact."""
    if kept.device.type != "cpu":
        return kept.to(dtype)
    return _from_bits(kept).to(dtype)


def _from_bits(kept: torch.Tensor) -> torch.Tensor:
    """Return numbers of fp8 in float32, several times as fast as torch converts them on a CPU."""
    # Exponent and digits of a float32 are at the places of those of fp8 in its upper bits; the sign
    # is repeated by the conversion to a signed integer.
    bits = kept.view(torch.int8).to(torch.int32)
    bits <<= 20
    bits &= _SIGN_AND_DIGITS
    return bits.view(torch.float32).mul_(_EXPONENT)


def numbers_at_once(device: torch.device) -> int:
    """Return how many keys, and values, are converted before they are used."""
    return 2**25 if device.type == "cuda" else 2**18
