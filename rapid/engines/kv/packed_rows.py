"""Keys and values in 8 or 4 bits, as passages are kept in host memory.

Each number is its group's least one and so many steps: ``least + step * code``, where a step is the
range of the group by 255 or by 15. A group of keys is one channel over the tokens of a passage, as
keys have channels that are large in every token; a group of values is one token's (Liu et al.,
"KIVI", ICML 2024, section 3). What is read back differs a little, which only a drafter may bear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Bits = Literal[4, 8]

_KEYS_BY, _VALUES_BY = 3, 4  # dimensions of the rows over which groups of keys and values run
_LEAST_STEP = 1e-6  # of a group whose numbers are all the same


def pack_rows(rows: torch.Tensor, bits: Bits | None) -> list[torch.Tensor]:
    """Return rows [layers, 2, kv_heads, tokens, head_dim] packed; as they are if `bits` is None.

    Returns:
        Codes of a byte, in 4 bits two in one, so that head_dim must be even; then the least number
        and the step of each group, of keys and of values, in the dtype of the rows.
    """
    if bits is None:
        return [rows]
    codes, groups = [], []
    for part, dim in zip(torch.split(rows, 1, 1), (_KEYS_BY, _VALUES_BY), strict=True):
        least, most = part.aminmax(dim=dim, keepdim=True)
        step = ((most.float() - least.float()) / (2**bits - 1)).clamp_min(_LEAST_STEP)
        step = step.to(rows.dtype)
        # By the step as it is kept, which was rounded.
        code = ((part.float() - least.float()) / step.float()).round().clamp_(0, 2**bits - 1)
        codes.append(code.to(torch.uint8))
        groups += [least, step]
    packed = torch.cat(codes, 1)
    if bits == 4:
        packed = packed[..., ::2] | packed[..., 1::2] << 4
    return [packed, *groups]


def unpack_rows(parts: Sequence[torch.Tensor], bits: Bits | None) -> torch.Tensor:
    """Return the rows of `pack_rows`, each number at most half a step from what it was."""
    packed, *groups = parts
    if bits is None:
        return packed
    if bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    found = [
        step.float() * code + least.float()
        for code, least, step in zip(
            torch.split(packed, 1, 1), groups[::2], groups[1::2], strict=True
        )
    ]
    return torch.cat(found, 1).to(groups[0].dtype)
