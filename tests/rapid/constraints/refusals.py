"""Drafted tokens that a grammar does not allow, counted where blocks are judged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid.engines.work.verifying import Verify


class Refusals:
    """Counts the drafted tokens that were judged and that their grammar did not allow."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        ask = Verify._ask

        def spy(work: Verify, logits: torch.Tensor) -> Any:
            drafted = work._block.token_ids[: len(work._block) - work._is_cut].tolist()
            chances = [row[token] for row, token in zip(logits, drafted, strict=False)]
            ends = [token in work._eos_ids for token in drafted]
            judged = chances[: ends.index(True) + 1] if any(ends) else chances
            self.count += sum(bool(chance.isneginf()) for chance in judged)
            return ask(work, logits)

        patch.setattr(Verify, "_ask", spy)
