"""The Qdrant store gives what the plain store gives, for every kind of vector."""

import numpy as np
import pytest

from retrieval.chunking import Chunk
from retrieval.config import LocalStoreConfig
from retrieval.embedding import Embedding, LexicalEmbedder, SparseVector, VectorSpace
from retrieval.qdrant import QdrantChunkStore
from tests.retrieval.plain_store import PlainChunkStore

SPACES = {
    "lexical": VectorSpace(None, sparse=True, idf=True),
    "dense": VectorSpace(8, sparse=False),
    "dense and sparse": VectorSpace(8, sparse=True),
}


def random_embedding(space, rng):
    dense = sparse = None
    if space.dense_size:
        vector = rng.normal(size=space.dense_size).astype(np.float32)
        dense = vector / np.linalg.norm(vector)
    if space.sparse:
        terms = np.sort(rng.choice(12, size=rng.integers(0, 6), replace=False))
        sparse = SparseVector(tuple(map(int, terms)), tuple(rng.uniform(0.1, 1, len(terms))))
    return Embedding(dense, sparse)


def chunks_of(document_id, num):
    return [Chunk(f"{document_id}:{i}", document_id, i, i + 1, "x", 1) for i in range(num)]


@pytest.fixture(params=SPACES.values(), ids=SPACES.keys())
def space(request):
    return request.param


@pytest.fixture
async def stores(space):
    stores = [
        PlainChunkStore(space),
        await QdrantChunkStore.open(LocalStoreConfig(), "chunks", space),
    ]
    yield stores
    for store in stores:
        await store.close()


async def same_everywhere(stores, tenant, documents, query, **how):
    plain, qdrant = [await s.search(tenant, documents, query, **how) for s in stores]
    np.testing.assert_allclose(
        [chunk.score for chunk in qdrant], [chunk.score for chunk in plain], rtol=1e-5
    )
    by_id = {chunk.id: chunk.score for chunk in plain}
    for chunk in qdrant:  # equal scores may come in any order, and at the limit either may stay
        assert by_id.get(chunk.id, plain[-1].score) == pytest.approx(chunk.score, rel=1e-5)
    return qdrant


async def test_scores_order_floor_and_limit_agree(stores, space):
    rng = np.random.default_rng(0)
    for tenant, document_id, num in [("a", "x", 12), ("a", "y", 9), ("b", "x", 15), ("b", "z", 4)]:
        embeddings = [random_embedding(space, rng) for _ in range(num)]
        for store in stores:
            await store.add(tenant, document_id, chunks_of(document_id, num), embeddings)
    found = 0
    for _ in range(12):
        query = random_embedding(space, rng)
        for tenant, documents in [("a", ["x"]), ("a", ["x", "y"]), ("b", ["z", "x"]), ("c", ["x"])]:
            for floor, limit in [(-1.0, 50), (0.2, 50), (0.0, 3)]:
                chunks = await same_everywhere(
                    stores, tenant, documents, query, floor=floor, limit=limit
                )
                assert len(chunks) <= limit
                assert {chunk.document for chunk in chunks} <= set(documents)
                found += len(chunks)
    assert found > 100


async def test_deleted_documents_are_gone_and_may_return(stores, space):
    rng = np.random.default_rng(1)
    query = random_embedding(VectorSpace(8, True) if space.dense_size else space, rng)
    query = Embedding(
        query.dense, SparseVector((1, 2, 3), (1.0, 1.0, 1.0)) if space.sparse else None
    )
    how = {"floor": -1.0, "limit": 50}
    for num in (10, 6, 14):  # fewer and more than before: places are used again
        embeddings = [random_embedding(space, rng) for _ in range(num)]
        for store in stores:
            await store.add("a", "x", chunks_of("x", num), embeddings)
            await store.add("b", "x", chunks_of("x", num), embeddings)
            await store.delete("b", "x")
            await store.delete("b", "never added")
        assert await same_everywhere(stores, "a", ["x"], query, **how)
        for store in stores:
            await store.delete("a", "x")
            assert await store.search("a", ["x"], query, **how) == []


async def test_another_tenants_text_never_moves_a_score():
    """Term statistics could leak: `Belaron` must stay rare for the first tenant."""
    embedder = LexicalEmbedder()
    store = await QdrantChunkStore.open(LocalStoreConfig(), "chunks", embedder.space)
    texts = ["The harbor of Belaron is Tessin.", "The mayor of Orrin is Vael.", "It rains a lot."]

    async def add(tenant, document_id, texts):
        chunks = [Chunk(f"{document_id}:{i}", "n", i, i + 1, t, 8) for i, t in enumerate(texts)]
        await store.add(tenant, document_id, chunks, embedder.embed_passages(texts))

    async def ask(documents):
        query = embedder.embed_query("What is the harbor of Belaron?")
        return await store.search("first", documents, query, limit=9, floor=embedder.floor)

    await add("first", "d", texts)
    alone = await ask(["d"])
    await add("second", "d", ["Belaron harbor Belaron harbor"] * 40)
    await add("first", "other", ["The harbor of Belaron."] * 40)
    assert await ask(["d"]) == alone
    assert [chunk.text for chunk in alone] == texts[:1]
    await store.close()
