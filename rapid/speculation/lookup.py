"""Prompt lookup: a drafter without a model, which copies what followed the same tokens before.

Saxena, "Prompt Lookup Decoding" (2023, github.com/apoorvumang/prompt-lookup-decoding); vLLM calls
it n-gram speculation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rapid.messages import DraftBlock, Verdict

MAX_NGRAM = 3  # tokens that must match, down to one; Saxena's default
_ID_BITS = 21  # three ids fill one int64: vocabularies of up to two million tokens


class PromptIndex:
    """An index of the last occurrence of every n-gram of a prompt, shared by all choices."""

    # Sorted arrays: a dict of tuples takes several times the memory (30 MB for 128K tokens). The
    # latest occurrence, and not Saxena's first, is the likelier one where an answer repeats itself.
    def __init__(self, prompt_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        ids = np.asarray(prompt_ids, dtype=np.int64)
        self.prompt_ids: list[int] = ids.tolist()
        self._latest: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]] = []
        grams = ids
        for size in range(1, MAX_NGRAM + 1):
            followed = grams[:-1]  # the last n-gram has no continuation yet
            keys, first = np.unique(followed[::-1], return_index=True)
            self._latest.append((keys, (len(followed) - 1 - first + size).astype(np.int32)))
            grams = followed << _ID_BITS | ids[size:]

    def find(self, gram: Sequence[int]) -> int | None:
        """Return the position after the latest `gram` that a token follows, or None."""
        keys, positions = self._latest[len(gram) - 1]
        key = 0
        for token_id in gram:
            key = key << _ID_BITS | token_id
        index = int(np.searchsorted(keys, key))
        return int(positions[index]) if index < len(keys) and keys[index] == key else None


class PromptLookupDrafter:
    """A drafter for one choice by prompt lookup; its blocks are ready when `draft` returns.

    A block is shorter than requested where the text ends, and empty where nothing matches. Its one
    candidate a row has probability 1, so there is nothing to transfer: eta is 0. Under `maximal`
    coupling the text depends on how it is split into blocks; its distribution does not.
    """

    def __init__(self, index: PromptIndex, choice: int = 0, committed: Sequence[int] = ()) -> None:
        self._index = index
        self._choice = choice
        self._num_prompt = len(index.prompt_ids)
        self._token_ids = list(index.prompt_ids)
        self._latest: dict[tuple[int, ...], int] = {}  # like the index, for the answer's tokens
        self._commit(committed)

    def draft(self, verdict: Verdict | None, num_tokens: int) -> DraftBlock:
        """Propose up to `num_tokens` tokens; see `rapid.ports.Drafter`."""
        began = time.perf_counter()
        if verdict is not None:
            self._commit(verdict.token_ids)
        start = self._continuation()
        drafted = [] if start is None else self._token_ids[start : start + num_tokens]
        token_ids = np.asarray(drafted, dtype=np.int32)
        return DraftBlock(
            lease_id="prompt-lookup",
            choice=self._choice,
            position=len(self._token_ids) - self._num_prompt,
            token_ids=token_ids,
            candidate_ids=token_ids[:, None],
            candidate_probs=np.ones((len(token_ids), 1), dtype=np.float32),
            draft_ms=(time.perf_counter() - began) * 1e3,
        )

    def _commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text, recording each as the continuation of the last n-grams."""
        for token_id in token_ids:
            for size in range(1, MAX_NGRAM + 1):
                self._latest[tuple(self._token_ids[-size:])] = len(self._token_ids)
            self._token_ids.append(token_id)

    def _continuation(self) -> int | None:
        """Return where the text continued after an earlier match of its longest last n-gram."""
        for size in range(min(MAX_NGRAM, len(self._token_ids)), 0, -1):
            gram = tuple(self._token_ids[-size:])
            position = self._latest.get(gram) or self._index.find(gram)
            if position is not None:
                return position
        return None
