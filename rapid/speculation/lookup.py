"""Prompt lookup: a drafter without a model, which copies what followed the same tokens before.

Saxena, "Prompt Lookup Decoding" (2023, github.com/apoorvumang/prompt-lookup-decoding); vLLM calls
it n-gram speculation. Here the longest match decides, and it bounds the draft, as in Oliaro et al.,
"SuffixDecoding" (arXiv 2411.04975). `docs/decisions/text-drafts.md` has what was tried.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rapid.messages import DraftBlock, Int32Array, Verdict

LEAST_MATCH = 2  # tokens; what follows a single one is seldom right, and judging it costs
LONGEST_MATCH = 32  # tokens; twice as many are the longest draft
_DRAFT_PER_MATCH = 2  # drafted tokens per matching one; the decision page has 1, 2 and no bound
_GRAM = 3  # tokens of a key of the index
_ID_BITS = 21  # three ids fill one int64: vocabularies of up to two million tokens
_MOST_PLACES = 256  # latest places of one gram that are compared: at most .2 ms
LOOKUP = "prompt-lookup"  # in place of the lease of a block

Match = tuple[int, int]  # where it ends, and how many tokens match; no match has none


class PromptIndex:
    """An index of where every three tokens of a prompt stand, shared by all choices.

    Attributes:
        prompt_ids: The prompt [num_prompt].
    """

    # One sorted array finds what a suffix automaton does, in a tenth of its time to build and a
    # twentieth of its memory.
    def __init__(self, prompt_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        self.prompt_ids: Int32Array = np.asarray(prompt_ids, dtype=np.int32)
        ids = self.prompt_ids.astype(np.int64)
        keys = ids[:-2] << 2 * _ID_BITS | ids[1:-1] << _ID_BITS | ids[2:]
        order = np.argsort(keys, kind="stable")
        self._keys, self._starts = keys[order], order.astype(np.int32)
        nothing = np.full(LONGEST_MATCH, -1, dtype=np.int32)
        self._padded = np.concatenate([nothing, self.prompt_ids])

    def find(self, tail: Sequence[int]) -> Match:
        """Return the longest match of the last tokens of `tail`, the latest of equal ones."""
        for size in (_GRAM, LEAST_MATCH):
            ends = self._ends(tail[-size:]) if len(tail) >= size else ()
            if len(ends):
                break
        else:
            return 0, 0
        if size == LEAST_MATCH:  # sorted by the token that follows
            return int(np.max(ends)), size
        ends = np.asarray(ends)[-_MOST_PLACES:]
        back = np.arange(1, len(tail) + 1)
        before = self._padded[ends[:, None] + LONGEST_MATCH - back]
        sizes = (before == np.asarray(tail)[::-1]).cumprod(axis=1).sum(axis=1)
        best = len(ends) - 1 - int(sizes[::-1].argmax())
        return int(ends[best]), int(sizes[best])

    def _ends(self, gram: Sequence[int]) -> Int32Array:
        """Return where a gram of two or three tokens ends in the prompt, before its last token."""
        key = 0
        for token_id in gram:
            key = key << _ID_BITS | token_id
        free = (_GRAM - len(gram)) * _ID_BITS  # bits of the tokens that follow a shorter gram
        key <<= free
        low = np.searchsorted(self._keys, key)
        high = np.searchsorted(self._keys, key | ((1 << free) - 1), side="right")
        ends: Int32Array = self._starts[low:high] + np.int32(len(gram))
        return ends[ends < len(self.prompt_ids)]


class PromptLookupDrafter:
    """A drafter for one choice by prompt lookup; its blocks are ready when `draft` returns.

    A block is shorter than requested where few tokens match, and empty where fewer than
    `LEAST_MATCH` do. Its one candidate a row has probability 1, so there is nothing to transfer:
    eta is 0. Under `maximal` coupling the text depends on how it is split into blocks; its
    distribution does not.
    """

    def __init__(self, index: PromptIndex, choice: int = 0, committed: Sequence[int] = ()) -> None:
        self._index = index
        self._choice = choice
        self._text = index.prompt_ids[-LONGEST_MATCH:].tolist()  # the prompt's end and the answer
        self._num_before = len(self._text)  # of the prompt's tokens in it
        self._ends: dict[tuple[int, ...], list[int]] = {}  # of every two tokens in it
        self._match: Match | None = None
        self.commit(committed)

    @property
    def longest(self) -> int:
        """Most tokens that it proposes next; 0 for nothing."""
        return _DRAFT_PER_MATCH * self._find()[1]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the answer."""
        for token_id in token_ids:
            gram = tuple(self._text[-LEAST_MATCH:])
            self._ends.setdefault(gram, []).append(len(self._text))
            self._text.append(token_id)
        self._match = None

    def draft(self, verdict: Verdict | None, num_tokens: int) -> DraftBlock:
        """Propose up to `num_tokens` tokens; see `rapid.ports.Drafter`."""
        began = time.perf_counter()
        if verdict is not None:
            self.commit(verdict.token_ids)
        end, size = self._find()
        drafted = self._read(end, min(num_tokens, _DRAFT_PER_MATCH * size))
        token_ids = np.asarray(drafted, dtype=np.int32)
        return DraftBlock(
            lease_id=LOOKUP,
            choice=self._choice,
            position=len(self._text) - self._num_before,
            token_ids=token_ids,
            candidate_ids=token_ids[:, None],
            candidate_probs=np.ones((len(token_ids), 1), dtype=np.float32),
            draft_ms=(time.perf_counter() - began) * 1e3,
        )

    def _find(self) -> Match:
        """Return the longest match; its end counts from the beginning of the prompt."""
        if self._match is None:
            end, size = self._find_in_answer()
            self._match = end + len(self._index.prompt_ids) - self._num_before, size
            if size < LONGEST_MATCH:
                found = self._index.find(self._text[-LONGEST_MATCH:])
                self._match = found if found[1] > size else self._match
        return self._match

    def _find_in_answer(self) -> Match:
        text, best = self._text, (0, 0)
        ends = self._ends.get(tuple(text[-LEAST_MATCH:]), []) if len(text) >= LEAST_MATCH else []
        for end in reversed(ends[-_MOST_PLACES:]):
            size = LEAST_MATCH
            longest = min(LONGEST_MATCH, end)
            while size < longest and text[end - size - 1] == text[-size - 1]:
                size += 1
            if size > best[1]:
                best = end, size
            if size == LONGEST_MATCH:
                break
        return best

    def _read(self, start: int, num_tokens: int) -> list[int]:
        """Return tokens of prompt and answer from `start` on; where they end, they repeat."""
        prompt_ids = self._index.prompt_ids
        read: list[int] = prompt_ids[start : start + num_tokens].tolist()
        behind = self._num_before + max(0, start - len(prompt_ids))
        read += self._text[behind : behind + num_tokens - len(read)]
        return [read[place % len(read)] for place in range(num_tokens)]
