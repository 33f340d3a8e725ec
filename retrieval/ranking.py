"""Ranking of scored chunks, and selection of those that fit a context budget."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrieval.chunking import RetrievedChunk, count_shared

_RRF_CONSTANT = 60  # Cormack, Clarke and Buettcher, SIGIR 2009

# Scores that differ only by rounding are equal: a float32 matrix product gives the same vector a
# different last digit in a different row (4e-7 of the score at 1,024 dimensions).
_RELATIVE_ROUNDING = 1e-5
_ABSOLUTE_ROUNDING = 1e-6  # the same for scores near 0

_HEARD_SHARE = 0.5  # of the best score: a document whose best chunk has it is heard

NOT_FOUND = -np.inf
"""The score of a chunk that a search does not find."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Chunks that a search found, best first.

    Attributes:
        places: Their places among all chunks [found].
        scores: Their scores [found].
    """

    places: NDArray[np.intp]
    scores: NDArray[np.float64]

    def by_name(self, names: Sequence[str]) -> dict[str, float]:
        """Return the scores by the chunks' names, which are given for all chunks."""
        return dict(zip((names[at] for at in self.places), self.scores.tolist(), strict=True))


def rank(scores: NDArray[np.float64], limit: int | None = None) -> Ranking:
    """Sort chunks by score, best first; equal scores keep the order in which they are given.

    Scores are equal when a chain of differences no larger than rounding joins them. Each gets the
    best score of its chain, so that a later sort finds them equal too.

    Args:
        scores: The score of every chunk, or `NOT_FOUND`.
        limit: What comes after so many may be left out; None leaves out nothing.
    """
    places = np.flatnonzero(scores > NOT_FOUND)
    if limit is not None and 2 * limit < len(places):
        # Sorting twice as many shows where the last chain ends, unless all that follow are in it.
        best = places[np.argpartition(-scores[places], 2 * limit)[: 2 * limit]]
        best = best[np.argsort(-scores[best])]
        ends = np.flatnonzero(_differ(-scores[best[limit - 1 :]]))
        if len(ends):
            places = best[: limit + ends[0]]
    places = places[np.argsort(-scores[places])]
    falling = scores[places]
    is_first = np.concatenate([np.ones(min(1, len(places)), bool), _differ(-falling)])
    chains = np.cumsum(is_first) - 1
    # One sort of numbers is five times as quick as `lexsort`.
    in_order = np.sort(chains * len(scores) + places) % max(1, len(scores))
    return Ranking(in_order, falling[is_first][chains])


def _differ(rising: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which sorted scores differ by more than rounding from the one before [scores - 1]."""
    sizes = np.abs(rising)
    rounding = _RELATIVE_ROUNDING * np.maximum(sizes[1:], sizes[:-1])
    found: NDArray[np.bool_] = rising[1:] - rising[:-1] > np.maximum(rounding, _ABSOLUTE_ROUNDING)
    return found


def fuse(
    by_meaning: Ranking,
    by_words: Ranking,
    num_chunks: int,
    sparse_weight: float | None,
    limit: int,
) -> Ranking:
    """Rank chunks by a dense and a sparse ranking together; see `ChunkStore.search`.

    Only chunks with a dense score count. Rankings of `num_chunks` chunks are fused by reciprocal
    rank where there is no weight: score ``sum of 1 / (60 + rank)``, ranks from zero. What comes
    after the first `limit` may be left out.
    """
    fused = np.full(num_chunks, NOT_FOUND)
    fused[by_meaning.places] = 0.0
    is_meant = fused[by_words.places] == 0.0
    words = Ranking(by_words.places[is_meant], by_words.scores[is_meant])
    if sparse_weight is not None:
        fused[by_meaning.places] = by_meaning.scores
        fused[words.places] += sparse_weight * words.scores
        return rank(fused, limit)
    for each in (by_meaning, words):
        fused[each.places] += 1 / (_RRF_CONSTANT + np.arange(len(each.places)))
    least = NOT_FOUND
    if limit < len(by_meaning.places):
        least = np.partition(fused, num_chunks - limit)[num_chunks - limit]
    places = np.flatnonzero(fused >= least if least > NOT_FOUND else fused > NOT_FOUND)
    places = places[np.argsort(-fused[places], kind="stable")]
    return Ranking(places, fused[places])


def select(
    ranked: Sequence[RetrievedChunk], budget_tokens: int, document_ids: Sequence[str] = ()
) -> list[RetrievedChunk]:
    """Choose the chunks that make up the context, and return them in document order.

    First each document is heard whose best chunk is good, by that chunk, best first and within half
    of the budget. Then, in order of score, a chunk that still fits is taken and one that does not
    is skipped, as is one that repeats a text already taken.

    Args:
        ranked: Chunks above the floor; equal scores keep their order.
        budget_tokens: The most tokens in total, separators not counted, and those that chunks share
            counted once.
        document_ids: The order of the documents in the result; other documents follow.
    """
    falling = sorted(ranked, key=lambda chunk: -chunk.score)
    chosen: list[RetrievedChunk] = []
    of_document = defaultdict[str, list[RetrievedChunk]](list)  # the chosen ones, in their order
    seen: set[str] = set()
    num_tokens = 0

    def take(chunks: Iterable[RetrievedChunk], budget_tokens: int) -> None:
        nonlocal num_tokens
        for chunk in chunks:
            text, own = " ".join(chunk.text.split()), of_document[chunk.document_id]
            at = bisect_left(own, chunk.end, key=lambda each: each.end)
            shared = [count_shared(each, chunk) for each in own[max(0, at - 1) : at]]
            shared += [count_shared(chunk, each) for each in own[at : at + 1]]
            num_new = max(0, chunk.num_tokens - sum(shared))
            if num_tokens + num_new <= budget_tokens and text not in seen:
                chosen.append(chunk)
                own.insert(at, chunk)
                seen.add(text)
                num_tokens += num_new

    firsts: dict[str, RetrievedChunk] = {}
    for chunk in falling:
        if chunk.score >= _HEARD_SHARE * falling[0].score:
            firsts.setdefault(chunk.document_id, chunk)
    if len(firsts) > 1:
        take(firsts.values(), budget_tokens // 2)
    take(falling, budget_tokens)
    place = {document_id: index for index, document_id in enumerate(document_ids)}
    return sorted(chosen, key=lambda c: (place.get(c.document_id, len(place)), c.start, c.end))
