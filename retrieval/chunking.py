"""Chunking of documents into slices that cover the document, in order.

Chunks end at token boundaries where one is in reach, so their sizes are known without tokenizing
twice and their offsets are exact. Each may begin with the last words of the one before.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

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
        first_token: The number of tokens before it in the document.
    """

    id: str
    document: str
    start: int
    end: int
    text: str
    num_tokens: int
    first_token: int = field(default=0, kw_only=True)

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
    overlap: int = 0,
    document_id: str = "document",
    name: str = "document",
) -> list[Chunk]:
    """Cut `text` into chunks such that every character is new in exactly one, in linear time.

    A chunk shares its first tokens with the one before; the rest is new. Chunks are filled
    greedily. Each ends, within the second half of what is new, at the last paragraph break, else
    the last sentence or line end, else the last word end, else at the bound. A paragraph that fits
    into one chunk is not cut.

    Args:
        token_offsets: Returns the tokens' character ranges, such as `hf_token_offsets(tokenizer)`.
        max_tokens: The most tokens that start in one chunk. Only a single new character made of
            more tokens than it has left exceeds it.
        max_chars: The most characters in one chunk. Defaults to 16 for each token.
        overlap: The tokens that a chunk shares with the one before; fewer where these have more
            than half of `max_chars`, or where a character has several.
        document_id: The prefix of the chunk ids.

    Raises:
        ValueError: A bound is below one, or the overlap is more than half of a chunk.
    """
    max_chars = 16 * max_tokens if max_chars is None else max_chars
    if max_tokens < 1 or max_chars < 1:
        raise ValueError(f"chunks need room: max_tokens={max_tokens}, max_chars={max_chars}")
    if not 0 <= overlap <= max_tokens // 2:
        raise ValueError(f"chunks of {max_tokens} tokens cannot share {overlap}")
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
            first_token=bisect_left(starts, start),
        )
        for index, (start, end) in enumerate(
            _ranges(text, starts, _Bounds(max_tokens, max_chars, overlap))
        )
    ]


AnyChunk = TypeVar("AnyChunk", bound=Chunk)


def count_shared(before: Chunk, after: Chunk) -> int:
    """Return how many tokens two chunks of a document, in its order, have in common."""
    if after.start >= before.end:
        return 0
    return before.first_token + before.num_tokens - after.first_token


def drop_shared(chunks: Sequence[AnyChunk]) -> list[AnyChunk]:
    """Return of each chunk what the one before it lacks: together they are the documents' own text.

    Args:
        chunks: Chunks of documents, those of each one after the other and in its order.
    """
    found = [*chunks[:1]]
    for before, chunk in pairwise(chunks):
        if before.document_id == chunk.document_id and chunk.start < before.end:
            num_shared = count_shared(before, chunk)
            chunk = replace(
                chunk,
                start=before.end,
                text=chunk.text[before.end - chunk.start :],
                num_tokens=max(0, chunk.num_tokens - num_shared),
                first_token=chunk.first_token + num_shared,
            )
        found.append(chunk)
    return found


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


class _Bounds(NamedTuple):
    max_tokens: int
    max_chars: int
    overlap: int


def _ranges(text: str, starts: Sequence[int], bounds: _Bounds) -> Iterator[tuple[int, int]]:
    new = 0
    while new < len(text):
        start, bound = _reach(len(text), starts, new, bounds)
        end = bound
        if bound < len(text):
            end = _nicest_cut(text, starts, new, bound, bounds)
        yield start, end
        new = end


def _reach(length: int, starts: Sequence[int], new: int, bounds: _Bounds) -> tuple[int, int]:
    """Return the start of the chunk whose new text begins at `new`, and its largest end."""
    token = bisect_left(starts, new)
    since = new - bounds.max_chars // 2
    if token > bounds.overlap:  # no part of a character of several tokens
        since = max(since, starts[token - bounds.overlap - 1] + 1)
    first = bisect_left(starts, since)
    start = min([new, *starts[first : first + 1]])
    left = bounds.max_tokens - max(0, token - first), bounds.max_chars - (new - start)
    return start, _last_end(length, starts, new, *left)


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


def _nicest_cut(text: str, starts: Sequence[int], start: int, bound: int, bounds: _Bounds) -> int:
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
                _, reach = _reach(len(text), starts, cut, bounds)
                if reach == len(text) or pattern.search(text, cut, reach + 2):
                    return cut
                break
    return bound
