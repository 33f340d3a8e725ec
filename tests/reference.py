"""Comparison of answers with `rapid.reference`, the slow definition of what is sampled.

The reference shares nothing with the engines, so equal texts mean that the whole path (leases,
blocks, page tables, ragged batches, acceptance) samples what it says. Two correct forwards differ
by rounding, so a token may differ where rounding decides it: at a *tie*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rapid.constraints.shaping import LogitBias
from rapid.reference import Reader, Settings, Token, generate
from rapid.replay import ShapedReader

__all__ = ["Reference", "Settings", "load_reference"]

_ROUNDING = 3e-4  # of logits near 10 in float32, as another order of sums changes them
_NUM_TRIES = 64


@cache
def load_reference(path: str | Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class RoundedReader(Reader):
    """A reader whose logits are off by as much as rounding may change them."""

    def __init__(self, reader: Reader, rng: np.random.Generator) -> None:
        self._reader, self._rng = reader, rng

    def logits(self, tokens: Sequence[int], count: int = 1) -> Any:
        rows = self._reader.logits(tokens, count)
        return rows + self._rng.uniform(-_ROUNDING, _ROUNDING, rows.shape)


@dataclass
class Reference:
    """A request as the reference answers it: who reads what, and with which settings.

    With a `witness_prompt` the target reads that too, and `adaptive` listens to it.
    """

    target: torch.nn.Module
    target_prompt: Sequence[int]
    settings: Settings
    num_tokens: int
    drafter: torch.nn.Module | None = None
    drafter_prompt: Sequence[int] = ()
    witness_prompt: Sequence[int] | None = None
    eos_ids: Sequence[int] = ()
    vocab: int | None = None
    logit_bias: Sequence[tuple[int, float]] = ()

    def readers(self) -> list[Reader | None]:
        how = (self.vocab, LogitBias(self.logit_bias) if self.logit_bias else None)
        drafter = self.drafter and ShapedReader(self.drafter, self.drafter_prompt, *how)
        witness = self.witness_prompt and ShapedReader(self.target, self.witness_prompt, *how)
        return [ShapedReader(self.target, self.target_prompt, *how), drafter, witness]

    def rest(self, readers: Sequence[Reader | None], so_far: Sequence[Token]) -> Iterator[Token]:
        target, drafter, witness = readers
        assert target is not None
        yield from generate(
            self.settings,
            self.num_tokens,
            target,
            drafter,
            witness,
            speculates=False,
            committed=[token.id for token in so_far],
            log_odds=so_far[-1].log_odds if so_far else 0.0,
        )

    def answer(self) -> list[Token]:
        """The answer, up to and including its end-of-sequence token."""
        answer = []
        for token in self.rest(self.readers(), ()):
            answer.append(token)
            if token.id in self.eos_ids:
                break
        return answer

    def is_tied(self, got: Sequence[int]) -> bool:
        """False when the texts are equal; True when they part at a tie; else the test fails."""
        want = self.answer()
        for position, (one, other) in enumerate(zip(got, want, strict=False)):
            if one != other.id:
                assert one in self.outcomes(want[:position]), (
                    f"{one}, not {other.id}, at {position}"
                )
                return True
        assert len(got) == len(want)
        return False

    def outcomes(self, so_far: Sequence[Token]) -> set[int]:
        """The tokens that may follow, by rounding."""
        rng, readers = np.random.default_rng(0), self.readers()
        rounded = [each and RoundedReader(each, rng) for each in readers]
        return {next(self.rest(rounded, so_far)).id for _ in range(_NUM_TRIES)}
