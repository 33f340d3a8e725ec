"""Penalties and bounds that follow the answer's own tokens, as OpenAI and vLLM define them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from typing_extensions import override

from rapid.constraints.shaping import Shaping
from rapid.errors import BadRequest


class Following(Shaping):
    """A shaping by the tokens of the answer, and how often it has each."""

    def __init__(self) -> None:
        self._said: list[int] = []
        self._counts = Counter[int]()

    @override
    def advance(self, token_ids: Sequence[int]) -> None:
        self._said += token_ids
        self._counts.update(token_ids)

    @override
    def roll_back(self, num_tokens: int) -> None:
        first = len(self._said) - num_tokens
        self._counts -= Counter(self._said[first:])  # which drops what is no more
        del self._said[first:]


class Penalties(Following):
    """Subtracts ``presence + frequency * count`` from the logits of tokens that were said.

    The prompt does not count. Source: OpenAI, "Advanced usage", frequency and presence penalties.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        super().__init__()
        self._presence, self._frequency = presence, frequency

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        shaped = row.to(torch.float32, copy=True)
        if self._counts:
            ids = torch.tensor([*self._counts], device=row.device)
            counts = torch.tensor([*self._counts.values()], device=row.device)
            shaped[ids] -= self._presence + self._frequency * counts
        return shaped


class RepetitionPenalty(Following):
    """Divides positive logits of tokens in prompt or answer, and multiplies negative ones.

    Source: Keskar et al., "CTRL", arXiv 1909.05858, section 4.1, with vLLM's sign rule.
    """

    def __init__(self, penalty: float, prompt_set: bytes) -> None:
        """Store the penalty, and the tokens of the prompt, as `pack_tokens` gives them."""
        super().__init__()
        self._penalty = penalty
        bits = np.unpackbits(np.frombuffer(prompt_set, np.uint8), bitorder="little")
        self._prompt = torch.from_numpy(bits.nonzero()[0])

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        self._prompt = self._prompt.to(row.device)
        self._prompt = self._prompt[self._prompt < len(row)]  # an embedding may have more rows
        shaped = row.to(torch.float32, copy=True)
        ids = torch.cat([self._prompt, torch.tensor([*self._counts], device=row.device).long()])
        of_said = shaped[ids]  # a token that is there twice gets the same twice
        shaped[ids] = torch.where(of_said > 0, of_said / self._penalty, of_said * self._penalty)
        return shaped


class BadWords(Following):
    """Forbids the last token of each of some words behind the others (vLLM's ``bad_words``)."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._always = [word[-1] for word in words if len(word) == 1]
        self._words = [tuple(word) for word in words if len(word) > 1]

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        after = (
            last
            for *before, last in self._words
            if self._said[len(self._said) - len(before) :] == before
        )
        shaped = row.clone()
        shaped[[*self._always, *after]] = -torch.inf
        return shaped


class LeastLength(Shaping):
    """Forbids the tokens that end an answer before it has so many (vLLM's ``min_tokens``)."""

    def __init__(self, min_tokens: int, eos_ids: Collection[int]) -> None:
        self._num_left, self._eos_ids = min_tokens, sorted(eos_ids)

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        if self._num_left <= 0:
            return row
        shaped = row.clone()
        shaped[self._eos_ids] = -torch.inf
        return shaped

    @override
    def advance(self, token_ids: Sequence[int]) -> None:
        self._num_left -= len(token_ids)

    @override
    def roll_back(self, num_tokens: int) -> None:
        self._num_left += num_tokens


class AllowedTokens(Shaping):
    """Forbids all tokens but a few (vLLM's ``allowed_token_ids``)."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = torch.tensor(token_ids)

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        shaped = torch.full_like(row, -torch.inf)
        ids = self._ids.to(row.device)
        return shaped.index_copy_(0, ids, row[ids])


class SomeTokenLeft(Shaping):
    """Refuses a row of which several bounds together have left nothing."""

    @override
    def shape(self, row: torch.Tensor) -> torch.Tensor:
        if bool(row.isneginf().all()):
            names = "allowed_token_ids, bad_words, min_tokens and logit_bias"
            raise BadRequest(f"{names} together leave no token that may come next.", "bad_words")
        return row
