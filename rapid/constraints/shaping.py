"""The seam where logits are shaped, before a question is asked of them.

The target's distribution p is by definition the shaped one. The drafter's and the witness's rows
are shaped alike, so that all of the method holds for the shaped distributions unchanged. Every
engine shapes its own rows: a shaping is a function of the lease's settings and the tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from typing_extensions import override


class Shaping(Protocol):
    """Shaping of one answer's logits; its state, if any, follows the tokens before the next row."""

    def shape(self, row: torch.Tensor) -> torch.Tensor:
        """Return the shaped logits of the next token [vocab]; `row` stays as it is."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Move the state behind tokens that follow."""
        return

    def roll_back(self, num_tokens: int) -> None:
        """Move the state back before the last `num_tokens` tokens."""
        return

    def find_forced(self) -> int | None:
        """Return the only token that may come next; None where it is not known to be the only."""
        return None

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens may come, as far as that is known without a row."""
        return len(token_ids)

    def prepare(self, token_ids: Sequence[int], num_rows: int) -> None:
        """Begin what `shape_rows` will need for rows whose tokens are known; do not wait for it."""
        return


class LogitBias(Shaping):
    """OpenAI's ``logit_bias``: numbers added to the logits of some tokens, at every position."""

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        """Store pairs of a token id and what is added to its logit."""
        self._ids = torch.tensor([token for token, _ in biases])
        self._biases = torch.tensor([bias for _, bias in biases], dtype=torch.float32)

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        if self._ids.device != row.device:
            self._ids, self._biases = self._ids.to(row.device), self._biases.to(row.device)
        shaped = row.to(torch.float32, copy=True)
        return shaped.index_add_(0, self._ids, self._biases)


class Shapings(Shaping):
    """Several shapings, one after the other."""

    def __init__(self, parts: Sequence[Shaping]) -> None:
        self._parts = parts

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        for part in self._parts:
            row = part.shape(row)
        return row

    @override
    def advance(self, token_ids: Sequence[int]) -> None:
        for part in self._parts:
            part.advance(token_ids)

    @override
    def roll_back(self, num_tokens: int) -> None:
        for part in self._parts:
            part.roll_back(num_tokens)

    @override
    def find_forced(self) -> int | None:
        # What several parts leave is no more than what one leaves.
        found = (part.find_forced() for part in self._parts)
        return next((token for token in found if token is not None), None)

    @override
    def count_allowed(self, token_ids: Sequence[int]) -> int:
        return min(part.count_allowed(token_ids) for part in self._parts)

    @override
    def prepare(self, token_ids: Sequence[int], num_rows: int) -> None:
        for part in self._parts:
            part.prepare(token_ids, num_rows)


def shape_rows(shaping: Shaping, logits: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
    """Return the shaped rows of consecutive positions; the state stays where it is.

    Args:
        shaping: The answer's shaping, behind the committed tokens.
        logits: One row for each position [rows, vocab], the last one after all of `drafted`.
        drafted: The uncommitted tokens, at least one fewer than rows.
    """
    first = len(drafted) - len(logits) + 1
    shaping.advance(drafted[:first])
    rows = []
    for row, token in zip(logits, [*drafted[first:], None], strict=True):
        rows.append(shaping.shape(row))
        if token is not None:
            shaping.advance([token])
    shaping.roll_back(len(drafted))
    return torch.stack(rows) if len(rows) > 1 else rows[0][None]
