"""Vectors of texts, and how relevant texts are to a query, from the embedder of a retriever."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrieval.embeddings.embedding import Embedding
from retrieval.settings import EmbedderConfig, LexicalEmbedderConfig

_MOST_WEIGHT = 2.2  # k1 + 1 of `LexicalEmbedder`: what a term weighs that a passage is full of


@dataclass(frozen=True, slots=True, eq=False)
class TextVectors:
    """What an embedder makes of texts.

    Attributes:
        model: The embedder's name.
        vectors: Dense vectors of unit length, float32 [texts, size]; none where `scores` are.
        scores: How relevant each text is to a query, from 0 to 1; empty without a query.
        num_tokens: Tokens of all texts, as the target counts them.
    """

    model: str
    vectors: NDArray[np.float32]
    scores: tuple[float, ...]
    num_tokens: int


def name_embedder(config: EmbedderConfig) -> str:
    """Return the name by which requests ask for an embedder."""
    return "lexical" if isinstance(config, LexicalEmbedderConfig) else config.model


def score_relevance(query: Embedding, passages: Sequence[Embedding]) -> tuple[float, ...]:
    """Return how relevant passages are to a query, from 0 to 1.

    With dense vectors that is their cosine, or 0 below it. Else it is the BM25 score, with inverse
    document frequencies ``log(1 + (n - m + 0.5) / (m + 0.5))`` of a term that `m` of the `n`
    passages have, as a share of the score of a passage that is full of the query's terms.
    """
    if query.dense is not None:
        dense = np.stack([each.dense for each in passages if each.dense is not None])
        return tuple(np.clip(dense @ query.dense, 0.0, 1.0).astype(float).tolist())
    weights = [_weights(each) for each in passages]
    found = Counter(term for each in weights for term in each)
    number = len(passages)
    asked = {
        term: weight * math.log(1 + (number - found[term] + 0.5) / (found[term] + 0.5))
        for term, weight in _weights(query).items()
    }
    whole = _MOST_WEIGHT * sum(asked.values())
    return tuple(
        sum(asked[term] * each[term] for term in asked.keys() & each) / whole if whole else 0.0
        for each in weights
    )


def _weights(embedding: Embedding) -> dict[int, float]:
    sparse = embedding.sparse
    return {} if sparse is None else dict(zip(sparse.terms, sparse.weights, strict=True))
