"""What only the store inside the process can do wrong; the rest is in `tests/congruence`."""

import numpy as np
import pytest

from retrieval.chunking import Chunk
from retrieval.embedding import Embedding, SparseVector, VectorSpace
from retrieval.errors import CollectionMismatch
from retrieval.local_store import LocalChunkStore

HYBRID = VectorSpace(4, sparse=True)
DENSE = np.array([1, 0, 0, 0], dtype=np.float32)
TERMS = SparseVector((1, 7), (0.5, 0.25))


def chunk(index=0):
    return Chunk(f"d:{index}", "name", index, index + 1, "x", 1)


async def test_vectors_of_another_size_are_refused():
    store = await LocalChunkStore.open("chunks", HYBRID)
    with pytest.raises(CollectionMismatch, match="dense vectors of 2"):
        await store.add("acme", "d", [chunk()], [Embedding(DENSE[:2], TERMS)], 1)
    await store.close()


async def test_many_documents_in_turn_take_the_room_of_one():
    """Local mode keeps deleted points for ever; their places are used again."""
    store = await LocalChunkStore.open("chunks", HYBRID)
    for turn in range(20):
        chunks = [chunk(index) for index in range(5)]
        await store.add("acme", f"d{turn}", chunks, [Embedding(DENSE, TERMS)] * 5, 5)
        await store.delete("acme", f"d{turn}")
    assert len(store._collection.client._client.collections["chunks"].ids) == 5
    await store.close()


async def test_a_place_given_to_another_tenant_during_a_search_shows_nothing(monkeypatch):
    store = await LocalChunkStore.open("chunks", HYBRID)
    embeddings = [Embedding(DENSE, TERMS)] * 2
    await store.add("acme", "d", [chunk(0), chunk(1)], embeddings, 2)
    score = store._collection.client.query_batch_points

    async def score_and_lose_the_place(*args):
        responses = await score(*args)
        await store.delete("acme", "d")
        await store.add("other", "d", [chunk(0), chunk(1)], embeddings, 2)
        return responses

    monkeypatch.setattr(store._collection.client, "query_batch_points", score_and_lose_the_place)
    assert await store.search("acme", ["d"], embeddings[0], limit=5, floor=0.3) == []
    await store.close()
