"""Ranking of scored chunks, and selection of those that fit a context budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from retrieval.chunking import RetrievedChunk

_RRF_CONSTANT = 60  # Cormack, Clarke and Buettcher, SIGIR 2009

# Scores that differ only by rounding are equal: a float32 matrix product gives the same vector a
# different last digit in a different row (4e-7 of the score at 1,024 dimensions).
_RELATIVE_ROUNDING = 1e-5
_ABSOLUTE_ROUNDING = 1e-6  # the same for scores near 0


def rank(scores: Mapping[str, float]) -> dict[str, float]:
    """Sort by score, best first; equal scores keep the order in which they are given.

    Scores are equal when a chain of differences no larger than rounding joins them. Each gets the
    best score of its chain, so that a later sort finds them equal too.
    """
    groups: list[list[str]] = []
    previous = math.inf
    for id_ in sorted(scores, key=lambda id_: -scores[id_]):
        score = scores[id_]
        if groups and math.isclose(
            score, previous, rel_tol=_RELATIVE_ROUNDING, abs_tol=_ABSOLUTE_ROUNDING
        ):
            groups[-1].append(id_)
        else:
            groups.append([id_])
        previous = score
    place = {id_: index for index, id_ in enumerate(scores)}
    return {
        id_: scores[group[0]] for group in groups for id_ in sorted(group, key=place.__getitem__)
    }


def reciprocal_ranks(
    rankings: Iterable[Iterable[str]], in_order: Sequence[str]
) -> dict[str, float]:
    """Fuse rankings by reciprocal rank: score ``sum of 1 / (60 + rank)``, ranks from zero.

    Ids come with their scores, best first; equal scores are in the order of `in_order`.
    """
    fused: dict[str, float] = {}
    for ranking in rankings:
        for place, id_ in enumerate(ranking):
            fused[id_] = fused.get(id_, 0.0) + 1 / (_RRF_CONSTANT + place)
    in_place = [id_ for id_ in in_order if id_ in fused]
    return {id_: fused[id_] for id_ in sorted(in_place, key=lambda id_: -fused[id_])}


def fuse(
    by_meaning: Mapping[str, float],
    by_words: Mapping[str, float],
    in_order: Iterable[str],
    sparse_weight: float | None,
) -> dict[str, float]:
    """Return the scores of a dense and a sparse ranking together, best first.

    Only chunks with a dense score count; see `ChunkStore.search`.
    """
    in_place = [id_ for id_ in in_order if id_ in by_meaning]
    if sparse_weight is None:
        by_words = {id_: score for id_, score in by_words.items() if id_ in by_meaning}
        return reciprocal_ranks([by_meaning, by_words], in_place)
    return rank({id_: by_meaning[id_] + sparse_weight * by_words.get(id_, 0.0) for id_ in in_place})


def select(
    ranked: Sequence[RetrievedChunk], budget_tokens: int, document_ids: Sequence[str] = ()
) -> list[RetrievedChunk]:
    """Choose the chunks that make up the context, and return them in document order.

    In order of score, a chunk that still fits is taken and one that does not is skipped, as is one
    that repeats a text already taken.

    Args:
        ranked: Chunks above the floor; equal scores keep their order.
        budget_tokens: The most tokens in total, separators not counted.
        document_ids: The order of the documents in the result; other documents follow.
    """
    chosen: list[RetrievedChunk] = []
    seen: set[str] = set()
    left = budget_tokens
    for chunk in sorted(ranked, key=lambda chunk: -chunk.score):
        text = " ".join(chunk.text.split())
        if chunk.num_tokens <= left and text not in seen:
            chosen.append(chunk)
            seen.add(text)
            left -= chunk.num_tokens
    place = {document_id: index for index, document_id in enumerate(document_ids)}
    return sorted(chosen, key=lambda c: (place.get(c.document_id, len(place)), c.start))
