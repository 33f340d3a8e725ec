"""The chunk store inside the process, on Qdrant's local mode, for thousands of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Self
from uuid import uuid4

from qdrant_client import AsyncQdrantClient
from qdrant_client import models as qm

from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embedding import Embedding, VectorSpace
from retrieval.qdrant import LOCAL, QdrantCollection
from retrieval.store import StoredDocument


class LocalChunkStore:
    """A `ChunkStore` of one retriever, which is gone with its process.

    Attributes:
        outage: None: the store is always there.
    """

    outage = None

    def __init__(self, collection: QdrantCollection) -> None:
        self._collection = collection
        self._stored: dict[tuple[str, str], StoredDocument] = {}
        self._point_ids: dict[tuple[str, str], list[str]] = {}
        # Local mode never frees a deleted point's slot and keeps scoring it, so ids are reused.
        self._free_point_ids: list[str] = []

    @classmethod
    async def open(cls, collection: str, space: VectorSpace) -> Self:
        """Create an empty store."""
        store = cls(QdrantCollection(AsyncQdrantClient(LOCAL), collection, space))
        await store._collection.prepare()
        return store

    @asynccontextmanager
    async def claimed(self, tenant: str, document_id: str) -> AsyncIterator[StoredDocument | None]:
        """Enter with the document if it is stored; see `ChunkStore.claimed`."""
        try:
            yield self._stored.get((tenant, document_id))
        except BaseException:
            await self.delete(tenant, document_id)
            raise

    async def add(
        self,
        tenant: str,
        document_id: str,
        chunks: Sequence[Chunk],
        embeddings: Sequence[Embedding],
        num_tokens: int,
    ) -> StoredDocument:
        """Add a document, in place of what was stored under its id; see `ChunkStore.add`."""
        await self.delete(tenant, document_id)
        key = (tenant, document_id)
        ids = self._unused_point_ids()
        points = self._collection.points(tenant, document_id, chunks, embeddings, ids)
        self._point_ids[key] = [str(point.id) for point in points]
        await self._collection.upsert(points)
        self._stored[key] = StoredDocument(len(points), num_tokens)
        return self._stored[key]

    async def search(
        self,
        tenant: str,
        document_ids: Sequence[str],
        query: Embedding,
        *,
        limit: int,
        floor: float,
    ) -> list[RetrievedChunk]:
        """Search as `ChunkStore.search` specifies; nothing is ever missing."""
        documents = {each: self._point_ids.get((tenant, each), []) for each in document_ids}
        return await self._collection.search(tenant, documents, query, limit=limit, floor=floor)

    async def evict(self, tenant: str, document_id: str) -> None:
        """Delete a document: every search visits every chunk that is held."""
        await self.delete(tenant, document_id)

    async def delete(self, tenant: str, document_id: str) -> None:
        """Delete a document; see `ChunkStore.delete`."""
        key = (tenant, document_id)
        self._stored.pop(key, None)
        ids = self._point_ids.pop(key, [])
        if not ids:
            return
        collection = self._collection
        await collection.client.delete(collection.name, qm.PointIdsList(points=list(ids)))
        self._free_point_ids.extend(ids)

    async def close(self) -> None:
        """Free the memory of all documents."""
        self._stored.clear()
        self._point_ids.clear()
        await self._collection.client.close()

    def _unused_point_ids(self) -> Iterator[str]:
        while True:
            yield self._free_point_ids.pop() if self._free_point_ids else str(uuid4())
