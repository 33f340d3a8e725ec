"""Documents in a folder, without an import that would cost a child process seconds."""

import numpy as np

from retrieval.chunking import Chunk
from retrieval.embeddings.embedding import Embedding, SparseVector, VectorSpace
from retrieval.settings import LocalStoreConfig
from retrieval.stores.local_store import LocalChunkStore

SPACE = VectorSpace(4, sparse=True)


def open_store(folder, index="index"):
    return LocalChunkStore.open(LocalStoreConfig(folder=str(folder)), SPACE, index)


def document(number):
    """A document of as many chunks as its number says, each with a text and a vector of its own."""
    names = [f"d{number}:{i}" for i in range(number)]
    chunks = [Chunk(name, "n", i, i + 1, f"secret {name}.", 3) for i, name in enumerate(names)]
    vectors = np.random.default_rng(number).normal(size=(number, 4)).astype(np.float32)
    return chunks, [Embedding(each, SparseVector((1, number), (0.5, 1.0))) for each in vectors], 9


async def add(store, number):
    return await store.add("us", f"d{number}", *document(number))
