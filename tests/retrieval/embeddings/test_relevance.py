"""How relevant texts are to a query, with vectors and with words alone."""

from __future__ import annotations

import numpy as np
import pytest

from rapid.errors import RetrievalPending
from retrieval import LexicalEmbedder, RetrievalConfig, Retriever
from retrieval import retriever as module
from retrieval.embeddings.embedding import Embedding
from retrieval.embeddings.relevance import name_embedder, score_relevance
from retrieval.settings import SentenceEmbedderConfig
from tests.retrieval.plain_store import PlainChunkStore
from tests.retrieval.tokens import words

PASSAGES = [
    "The mills of Orrin grind slowly.",
    "The harbor of Belaron is Tessin, and the harbor is deep.",
    "A harbor is where ships are.",
    "It rains.",
]


def retriever() -> Retriever:
    embedder = LexicalEmbedder()
    return Retriever(RetrievalConfig(), embedder, PlainChunkStore(embedder.space), words)


async def test_words_rank_as_bm25_does_and_scores_are_shares() -> None:
    found, query = await retriever().embed("acme", PASSAGES, "the harbor of Belaron")
    assert query is not None
    scores = score_relevance(query, found)
    assert sorted(range(4), key=lambda i: -scores[i])[:2] == [1, 2]
    assert scores[3] == 0
    assert all(0 <= each < 1 for each in scores)


async def test_a_query_without_words_finds_nothing_relevant() -> None:
    found, query = await retriever().embed("acme", PASSAGES, "?")
    assert query is not None
    assert score_relevance(query, found) == (0, 0, 0, 0)


def test_vectors_rank_by_their_cosine() -> None:
    def vector(*numbers: float) -> Embedding:
        return Embedding(np.array(numbers, np.float32), None)

    passages = [vector(0, 1), vector(1, 0), vector(-1, 0)]
    assert score_relevance(vector(0.6, 0.8), passages) == pytest.approx((0.8, 0.6, 0))


async def test_many_texts_are_embedded_in_turns_and_in_order() -> None:
    texts = [f"passage {number}" for number in range(100)]
    found, query = await retriever().embed("acme", texts)
    assert query is None
    alone = [*LexicalEmbedder().embed_passages(texts)]
    assert [each.sparse for each in found] == [each.sparse for each in alone]


async def test_a_tenant_has_only_so_many_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 0)
    with pytest.raises(RetrievalPending):
        await retriever().embed("acme", PASSAGES)


def test_embedders_have_names() -> None:
    assert name_embedder(RetrievalConfig().embedder) == "lexical"
    assert name_embedder(SentenceEmbedderConfig(kind="sentence-transformers", model="a/b")) == "a/b"
