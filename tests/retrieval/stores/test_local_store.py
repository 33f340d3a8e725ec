"""What only the store inside the process can do wrong; the rest is in `tests/congruence`."""

import asyncio
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from retrieval.chunking import Chunk
from retrieval.embeddings.embedding import Embedding, SparseVector, VectorSpace
from retrieval.retrieval_errors import CollectionMismatch
from retrieval.stores.local_store import LocalChunkStore

HYBRID = VectorSpace(4, sparse=True)
DENSE = np.array([1, 0, 0, 0], dtype=np.float32)
TERMS = SparseVector((1, 7), (0.5, 0.25))


def chunk(index=0):
    return Chunk(f"d:{index}", "name", index, index + 1, "x", 1)


async def test_vectors_of_another_size_are_refused():
    store = LocalChunkStore(HYBRID)
    with pytest.raises(CollectionMismatch, match="dense vectors of 2"):
        await store.add("acme", "d", [chunk()], [Embedding(DENSE[:2], TERMS)], 1)
    await store.close()


async def test_what_is_deleted_or_replaced_takes_no_memory():
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    store = LocalChunkStore(HYBRID)
    freed = []
    for turn in range(20):
        chunks = [chunk(index) for index in range(5)]
        await store.add("acme", f"d{turn % 2}", chunks, [Embedding(DENSE, TERMS)] * 5, 5)
        freed.append(weakref.ref(store._documents["acme", f"d{turn % 2}"].dense))
    await store.delete("acme", "d0")
    assert store.num_chunks == 5
    await asyncio.to_thread(int)  # so that the thread has let go of its last result
    assert sum(each() is not None for each in freed) == 1


async def test_a_search_goes_on_in_a_thread_with_what_it_began_with(monkeypatch):
    store = LocalChunkStore(HYBRID)
    embeddings = [Embedding(DENSE, TERMS)] * 2
    await store.add("acme", "d", [chunk(0), chunk(1)], embeddings, 2)
    search, threads = store._search, []
    has_begun, go_on = threading.Event(), threading.Event()

    def wait_and_search(*args):
        threads.append(threading.current_thread())
        has_begun.set()
        assert go_on.wait(10)
        return search(*args)

    monkeypatch.setattr(store, "_search", wait_and_search)
    searching = asyncio.create_task(store.search("acme", ["d"], embeddings[0], limit=5, floor=0.3))
    await asyncio.to_thread(has_begun.wait, 10)
    await store.delete("acme", "d")  # the event loop is free meanwhile
    go_on.set()
    assert [each.id for each in await searching] == ["d:0", "d:1"]
    assert await store.search("acme", ["d"], embeddings[0], limit=5, floor=0.3) == []
    assert threading.main_thread() not in threads


async def test_a_question_reads_no_document_but_those_it_is_about(monkeypatch):
    store = LocalChunkStore(HYBRID)
    for tenant, document_id in (("acme", "d"), ("acme", "e"), ("other", "d")):
        await store.add(tenant, document_id, [chunk()], [Embedding(DENSE, TERMS)], 1)
    read = []
    monkeypatch.setattr(store, "_search", lambda documents, *_: read.extend(documents) or [])
    await store.search("acme", ["d", "d", "never"], Embedding(DENSE, TERMS), limit=5, floor=0.3)
    assert read == [store._documents["acme", "d"]]
