"""Tables of what the kernels of `row_kernels` are asked about each row, and of what they decide."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl

Table = npt.NDArray[Any]
"""Rows of `ROW` or of `DECIDED`."""

# Modes: how the token of a row is chosen.
BEST = tl.constexpr(0)  # the one of most weight
RACE = tl.constexpr(1)  # by a race of all weights
RESIDUAL = tl.constexpr(2)  # the drafted one if it is accepted, else by a race of the residual

# Transfers; 0 is for a row that follows the target alone.
DISTILL = tl.constexpr(1)
BOOST = tl.constexpr(2)
MIXTURE = tl.constexpr(3)
ADAPTIVE = tl.constexpr(4)

# What is asked about a row, in words of eight bytes; of a witness's row, the temperature.
ROW = np.dtype(
    [
        ("mode", np.int64),
        ("transfer", np.int64),
        ("drafted", np.int64),  # -1 for a plain token
        ("witness", np.int64),  # its row of the logits, or -1
        ("top_k", np.int64),  # at most the size of the vocabulary
        ("keys", np.int64, 3),  # of the noise of the token that is drawn
        ("temperature", np.float64),
        ("eta", np.float64),
        ("plausibility", np.float64),
        ("log_odds", np.float64),  # before the block
        ("number", np.float64),  # uniform, which the drafted token is accepted by
        ("top_p", np.float64),
    ]
)
# What is asked about a row that proposes.
PROPOSAL = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),  # at most the size of the vocabulary
        ("min_p", np.float64),
        ("keys", np.int64, 3),  # of the noise of the token that is drawn
        ("is_random", np.int64),  # 0 for a greedy one
    ]
)
# What is decided: the token that is drawn, p and q of it for the odds, and the drafted token's. Of
# both p_hat before filters, which the row has computed anyway, for who asks how likely they were.
DECIDED = np.dtype(
    [
        (name, np.float64)
        for name in (
            "token", "is_sure", "target", "told",
            "is_accepted", "is_accepted_surely", "drafted_target", "drafted_told",
            "fused", "drafted_fused",
        )
    ]
)  # fmt: skip


def _columns(dtype: np.dtype[Any]) -> list[tl.constexpr]:
    """Return the words of a row at which its fields begin."""
    assert dtype.fields is not None
    return [tl.constexpr(offset // 8) for _, offset, *_ in dtype.fields.values()]


MODE, TRANSFER, DRAFTED, WITNESS, TOP_K, KEYS, *_rest = _columns(ROW)
TEMPERATURE, ETA, PLAUSIBILITY, ODDS, NUMBER, TOP_P = _rest
ROW_WORDS = tl.constexpr(ROW.itemsize // 8)
TOKEN, IS_SURE, TARGET, TOLD, *_rest = _columns(DECIDED)
IS_ACCEPTED, IS_ACCEPTED_SURELY, DRAFTED_TARGET, DRAFTED_TOLD, FUSED, DRAFTED_FUSED = _rest
DECIDED_WORDS = tl.constexpr(DECIDED.itemsize // 8)
