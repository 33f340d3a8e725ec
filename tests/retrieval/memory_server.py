"""A Qdrant in memory that several stores share, as they would a server, and that can be away."""

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from qdrant_client import AsyncQdrantClient
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from retrieval.embeddings.embedding import VectorSpace
from retrieval.stores.qdrant import QdrantCollection
from retrieval.stores.shared_store import SharedChunkStore

CALLS = (
    "collection_exists", "create_collection", "get_collection", "upsert", "retrieve", "count",
    "delete", "scroll", "set_payload", "query_batch_points",
)  # fmt: skip


class MemoryServer:
    """Local mode behind the client's methods, without the ways in which a server differs.

    Attributes:
        is_away: Whether every call fails as without a server.
        calls: How often each method was called.
        before: Called with a method's name before it runs.
    """

    def __init__(self) -> None:
        self.client = AsyncQdrantClient(":memory:")
        self.is_away = False
        self.calls: Counter[str] = Counter()
        self.before: Callable[[str], None] = lambda name: None
        for name in CALLS:
            setattr(self, name, self._passed_on(name))

    def _passed_on(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            self.before(name)
            if self.is_away:
                raise ResponseHandlingException(ConnectionError("connection refused"))
            for query in args[1] if name == "query_batch_points" else ():
                query.params.exact = None  # local mode is always exact, and warns
            try:
                return await getattr(self.client, name)(*args, **kwargs)
            except ValueError as error:
                if "not found" not in str(error):
                    raise
                raise UnexpectedResponse(404, "Not Found", str(error).encode(), {}) from error  # type: ignore[arg-type]

        return call

    async def info(self) -> SimpleNamespace:
        return SimpleNamespace(version="1.19.0")

    async def create_payload_index(self, *args: Any) -> None:
        """Local mode has no such index, and warns."""

    async def close(self) -> None:
        """One store has left; the others still use the server."""

    async def empty(self) -> None:
        """Lose everything, as a server that comes back without its disk."""
        for each in (await self.client.get_collections()).collections:
            await self.client.delete_collection(each.name)

    async def points(self, collection: str = "chunks") -> list[dict[str, Any]]:
        """The payload of every point."""
        records, _ = await self.client.scroll(collection, limit=10_000, with_payload=True)
        return [record.payload or {} for record in records]

    async def num_chunks(self) -> int:
        return sum("chunk_id" in payload for payload in await self.points())

    def store(
        self,
        space: VectorSpace,
        *,
        index: str = "index",
        ttl_s: float = 1000.0,
        clock: Callable[[], float] = time.time,
    ) -> SharedChunkStore:
        """Another retriever's store on this server, which sweeps when it is told to."""
        collection = QdrantCollection(self, "chunks", space, url="memory")  # type: ignore[arg-type]
        return SharedChunkStore(collection, index, ttl_s, clock)
