"""Chunking of documents into slices whose concatenation is the document.

Chunks end at token boundaries where one is in reach, so their sizes are known without tokenizing
twice and their offsets are exact.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

TokenOffsets = Callable[[str], Sequence[tuple[int, int]]]
"""``text -> [(start, end), ...]``: the half-open character range of each token, in order."""

# Each match ends where a chunk may end: after an empty line, a sentence or line, or a word.
# The space before a word belongs to the next chunk: many tokenizers make it part of the word.
_PARAGRAPH_END = re.compile(r"\n(?:[^\S\n]*\n)+")
_SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*(?=\s)|[。！？][」』”’）]*|\n""")
_WORD_END = re.compile(r"(?<=\S)(?=\s)")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of a document: ``document_text[start:end] == text``.

    Attributes:
        id: ``{document_id}:{index}``, the same whenever the same document is cut the same way.
        num_tokens: Its number of tokens in the tokenization of the whole document.
    """

    id: str
    document: str
    start: int
    end: int
    text: str
    num_tokens: int

    @property
    def document_id(self) -> str:
        """The part of `id` that all chunks of a document share."""
        return self.id.rpartition(":")[0]


@dataclass(frozen=True, slots=True)
class RetrievedChunk(Chunk):
    """A chunk that a search returned.

    Attributes:
        score: Higher is better; scores compare within one search only.
        cosine: The cosine of its dense vector and the query's; None where there are none.
    """

    score: float
    cosine: float | None = None


def chunk_text(
    text: str,
    token_offsets: TokenOffsets,
    *,
    max_tokens: int,
    max_chars: int | None = None,
    document_id: str = "document",
    name: str = "document",
) -> list[Chunk]:
    """Cut `text` into chunks such that every character is in exactly one, in linear time.

    Chunks are filled greedily. Each ends, within its second half, at the last paragraph break, else
    the last sentence or line end, else the last word end, else at the bound. A paragraph that fits
    into one chunk is not cut.

    Args:
        token_offsets: Returns the tokens' character ranges, such as `hf_token_offsets(tokenizer)`.
        max_tokens: The most tokens that start in one chunk. Only a single character made of more
            tokens exceeds it.
        max_chars: The most characters in one chunk. Defaults to 16 for each token.
        document_id: The prefix of the chunk ids.

    Raises:
        ValueError: A bound is below one.
    """
    max_chars = 16 * max_tokens if max_chars is None else max_chars
    if max_tokens < 1 or max_chars < 1:
        raise ValueError(f"chunks need room: max_tokens={max_tokens}, max_chars={max_chars}")
    # Offsets of a tokenizer that rewrites text may step back by a character; cuts must not.
    starts = list(accumulate((start for start, _ in token_offsets(text)), max))
    return [
        Chunk(
            id=f"{document_id}:{index}",
            document=name,
            start=start,
            end=end,
            text=text[start:end],
            # A slice inside one huge token still takes room in a prompt.
            num_tokens=max(1, bisect_left(starts, end) - bisect_left(starts, start)),
        )
        for index, (start, end) in enumerate(_ranges(text, starts, max_tokens, max_chars))
    ]


def hf_token_offsets(tokenizer: Any) -> TokenOffsets:
    """Return the token offsets function of a Hugging Face tokenizer.

    Raises:
        ValueError: It is a slow tokenizer, which does not report offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} gives no character offsets: load a fast tokenizer "
            "(one with a tokenizer.json)"
        )

    def token_offsets(text: str) -> Sequence[tuple[int, int]]:
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            truncation=False,
            verbose=False,
        )
        offsets: Sequence[tuple[int, int]] = encoded["offset_mapping"]
        return offsets

    return token_offsets


def _ranges(
    text: str, starts: Sequence[int], max_tokens: int, max_chars: int
) -> Iterator[tuple[int, int]]:
    start = 0
    while start < len(text):
        bound = _last_end(len(text), starts, start, max_tokens, max_chars)
        end = bound
        if bound < len(text):
            end = _nicest_cut(text, starts, start, bound, max_tokens, max_chars)
        yield start, end
        start = end


def _last_end(
    length: int, starts: Sequence[int], start: int, max_tokens: int, max_chars: int
) -> int:
    """Return the largest end of a chunk that begins at `start`, on a token boundary if possible."""
    first = bisect_left(starts, start)
    by_tokens = starts[first + max_tokens] if first + max_tokens < len(starts) else length
    if by_tokens <= start:  # one character of more than `max_tokens` tokens: take it whole
        after = bisect_right(starts, start)
        by_tokens = starts[after] if after < len(starts) else length
    if by_tokens <= start + max_chars:
        return by_tokens
    reach = bisect_right(starts, start + max_chars)
    return starts[reach - 1] if reach and starts[reach - 1] > start else start + max_chars


def _nicest_cut(
    text: str, starts: Sequence[int], start: int, bound: int, max_tokens: int, max_chars: int
) -> int:
    """Return the best token start in the second half of ``text[start:bound]``, or `bound`."""
    half = start + (bound - start) // 2
    for pattern in (_PARAGRAPH_END, _SENTENCE_END, _WORD_END):
        # A paragraph at the bound goes whole to the next chunk if it fits into one.
        since = start if pattern is _PARAGRAPH_END else half
        for match in reversed(list(pattern.finditer(text, since, bound + 1))):
            token = bisect_left(starts, match.end())
            if token == len(starts) or not start < starts[token] <= bound:
                continue
            cut = starts[token]
            if cut > half:
                return cut
            if pattern is _PARAGRAPH_END:
                reach = _last_end(len(text), starts, cut, max_tokens, max_chars)
                if reach == len(text) or pattern.search(text, cut, reach + 2):
                    return cut
                break
    return bound
