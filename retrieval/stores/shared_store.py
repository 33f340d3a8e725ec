"""The chunk store on a Qdrant server, which retrievers share.

A document's points are named by its content, its tenant and its index
(`RetrievalConfig.index_name`), so that to add a document twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self

from qdrant_client import AsyncQdrantClient

from rapid.engine_status import Erasure
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.embedding import Embedding, VectorSpace
from retrieval.retrieval_errors import ChunksMissing, RetrievalError, StoreUnavailable
from retrieval.settings import ServerStoreConfig
from retrieval.stores.manifests import CLAIM_S, Manifests, chunk_point_ids
from retrieval.stores.qdrant import QdrantCollection
from retrieval.stores.store import StoredDocument, is_of_text

_log = logging.getLogger(__name__)

_LOOK_S = 0.5  # between two looks at a document that another retriever adds
_RENEWALS_PER_CLAIM = 3  # before a claim would end
_LONGEST_RETRY_S = 10.0  # longest time without retrieval after a server is back
_SWEEPS_PER_TTL = 10  # sweeps in a time to live
_LONGEST_SWEEP_S = 600.0  # longest time between two sweeps


class SharedChunkStore:
    """A `ChunkStore` of several retrievers, in one Qdrant collection.

    While the server is away, calls are refused at once; only the store itself asks whether it is
    back. Documents unused for the time to live are deleted by the retriever that notices first.
    """

    def __init__(
        self,
        collection: QdrantCollection,
        index: str,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Store the settings; `keep` opens the collection, which need not exist yet.

        Args:
            index: The name of everything beside a text that decides its chunks and vectors.
            ttl_s: How long a document stays after its last use, in seconds.
            clock: Returns the seconds since the epoch.
        """
        self._collection = collection
        self._index = index
        self._ttl_s = ttl_s
        self._manifests = Manifests(collection, ttl_s, clock)
        self._point_ids: dict[tuple[str, str], list[str]] = {}
        self._outage: str | None = None
        self._fell_away = asyncio.Event()
        self._is_prepared = False
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, config: ServerStoreConfig, collection: str, space: VectorSpace, index: str
    ) -> Self:
        """Connect, and create the collection if it does not exist; the server may be away.

        Raises:
            CollectionMismatch: The collection was made for other vectors, or the server is too old.
        """
        of = _connect(config, collection, space)
        store = cls(of, index, config.ttl_s)
        try:
            await store.keep()
        except BaseException:
            await of.client.close()
            raise
        return store

    @property
    def outage(self) -> str | None:
        """Why the server cannot be reached; see `ChunkStore.outage`."""
        return self._outage

    async def keep(self) -> None:
        """Open the collection, and from now on sweep it and ask for a server that is away.

        Raises:
            CollectionMismatch: See `open`.
        """
        with suppress(StoreUnavailable):
            async with self._server():
                pass
        self._keeper = asyncio.create_task(self._keep())

    @asynccontextmanager
    async def claim(self, tenant: str, document_id: str) -> AsyncIterator[StoredDocument | None]:
        """Enter with a stored document or with the claim to add it; see `ChunkStore.claim`."""
        named = self._document_key(document_id)
        while True:
            async with self._server():
                found = await self._manifests.claim(tenant, named)
            if isinstance(found, StoredDocument):
                self._remember(tenant, document_id, found)
                yield found
                return
            if found.is_ours:
                break
            await asyncio.sleep(_LOOK_S)
        renewing = asyncio.create_task(self._renew(tenant, named))
        try:
            yield None
        except BaseException:
            with suppress(RetrievalError):
                async with self._server():
                    await self._manifests.release(tenant, named)
            raise
        finally:
            renewing.cancel()

    async def find_stored(self, tenant: str, document_ids: Collection[str]) -> set[str]:
        """Return the documents that are complete."""
        named = {self._document_key(each): each for each in document_ids}
        async with self._server():
            return {named[each] for each in await self._manifests.find_complete(tenant, named)}

    async def add(
        self,
        tenant: str,
        document_id: str,
        chunks: Sequence[Chunk],
        embeddings: Sequence[Embedding],
        num_tokens: int,
    ) -> StoredDocument:
        """Write a document's chunks, and then that they are complete; see `ChunkStore.add`."""
        named = self._document_key(document_id)
        ids = chunk_point_ids(tenant, named, len(chunks))
        points = self._collection.points(tenant, named, chunks, embeddings, ids)
        stored = StoredDocument(len(points), num_tokens)
        async with self._server():
            await self._collection.upsert(points)
            await self._manifests.complete(tenant, named, stored)
        self._remember(tenant, document_id, stored)
        return stored

    async def search(
        self,
        tenant: str,
        document_ids: Sequence[str],
        query: Embedding,
        *,
        limit: int,
        floor: float,
    ) -> list[RetrievedChunk]:
        """Search as `ChunkStore.search` specifies, and count what there is to search in."""
        documents = {
            self._document_key(each): self._point_ids[tenant, each]
            for each in document_ids
            if (tenant, each) in self._point_ids
        }
        if not documents:
            return []
        promised = sum(map(len, documents.values()))
        # A store that was emptied must not look like a document that says nothing of the question.
        async with self._server():
            await self._manifests.refresh(tenant, list(documents))
            found, num_held = await asyncio.gather(
                self._collection.search(tenant, documents, query, limit=limit, floor=floor),
                self._collection.count(tenant, documents),
            )
            if num_held < promised:
                await self._revoke_incomplete(tenant, documents)
                raise ChunksMissing(f"{promised - num_held} of {promised} chunks are gone")
        return found

    async def list_chunks(
        self, tenant: str, document_id: str, first: int, count: int
    ) -> list[Chunk]:
        """Return chunks of a document; see `ChunkStore.list_chunks`."""
        ids = self._point_ids[tenant, document_id][first : first + count]
        async with self._server():
            named = self._document_key(document_id)
            found = await self._collection.read_chunks(tenant, named, ids)
            if len(found) < len(ids):
                await self._revoke_incomplete(tenant, {named: self._point_ids[tenant, document_id]})
                raise ChunksMissing(f"{len(ids) - len(found)} of {len(ids)} chunks are gone")
        return found

    async def sweep(self) -> int:
        """Delete documents whose time to live has passed, and return how many."""
        # The manifest goes last, and only if nobody has claimed the document: several may sweep.
        num_swept = 0
        while expired := await self._manifests.find_expired():
            for tenant, document_id in expired:
                await self._collection.delete(tenant, document_id)
                await self._manifests.delete(tenant, document_id, if_expired=True)
            num_swept += len(expired)
        return num_swept

    async def evict(self, tenant: str, document_id: str) -> None:
        """Forget a document; others may use it, so it stays until it expires."""
        self._point_ids.pop((tenant, document_id), None)
        self._manifests.forget(tenant, self._document_key(document_id))

    async def delete(self, tenant: str, document_id: str) -> None:
        """Delete a document for all retrievers; see `ChunkStore.delete`."""
        self._point_ids.pop((tenant, document_id), None)
        async with self._server():
            await self._collection.delete(tenant, self._document_key(document_id))
            await self._manifests.delete(tenant, self._document_key(document_id))

    async def delete_text(self, tenant: str, text_id: str) -> Erasure:
        """Delete all documents of a text for all retrievers; see `ChunkStore.delete_text`.

        The server finds their points by an index, so that no bytes are looked through. What it
        deletes it finds no more; its files have it until it merges them.
        """
        for key in [key for key in self._point_ids if is_of_text(key, tenant, text_id)]:
            del self._point_ids[key]
        async with self._server():
            listed = await self._manifests.list_documents(tenant)
            named = [
                each
                for each in listed
                if is_of_text((tenant, each.rpartition("/")[2]), tenant, text_id)
            ]
            for each in named:
                await self._collection.delete(tenant, each)
                await self._manifests.delete(tenant, each)
        place = "passages (the server's segments and log are the operator's)"
        return Erasure(place, num_found=len(named))

    async def close(self) -> None:
        """Disconnect; what was added stays for the others."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._collection.client.close()

    def _document_key(self, document_id: str) -> str:
        return f"{self._index}/{document_id}"

    def _remember(self, tenant: str, document_id: str, stored: StoredDocument) -> None:
        ids = chunk_point_ids(tenant, self._document_key(document_id), stored.num_chunks)
        self._point_ids[tenant, document_id] = ids

    async def _revoke_incomplete(self, tenant: str, documents: dict[str, list[str]]) -> None:
        for named, point_ids in documents.items():
            if await self._collection.count(tenant, [named]) < len(point_ids):
                await self._manifests.revoke(tenant, named)

    async def _renew(self, tenant: str, named: str) -> None:
        """Renew a claim until cancelled; an absent server may be back before the claim ends."""
        while True:
            await asyncio.sleep(CLAIM_S / _RENEWALS_PER_CLAIM)
            with suppress(RetrievalError):
                async with self._server():
                    await self._manifests.renew(tenant, named)

    @asynccontextmanager
    async def _server(self, *, is_probe: bool = False) -> AsyncIterator[None]:
        """Enclose calls of the server, and note whether it is away; then only probes reach it."""
        if self._outage is not None and not is_probe:
            raise StoreUnavailable(self._outage)
        try:
            if not self._is_prepared:
                await self._collection.prepare()
                self._is_prepared = True
            yield
        except ChunksMissing:
            self._is_prepared = False  # the collection may be gone
            raise
        except RetrievalError as error:
            self._is_prepared = False  # another server may come back
            if self._outage is None:
                _log.warning("retrieval is away: %s", error)
            self._outage = str(error)
            self._fell_away.set()
            raise
        if self._outage is not None:
            self._outage = None
            _log.warning("retrieval is back")

    async def _keep(self) -> None:
        """Sweep now and then while the server is there, and probe it while it is away."""
        sweep_every_s = min(self._ttl_s / _SWEEPS_PER_TTL, _LONGEST_SWEEP_S)
        retry_s = _LOOK_S
        while True:
            if self._outage is None:
                self._fell_away.clear()
                with suppress(TimeoutError):  # replicas that started together sweep in turn
                    async with asyncio.timeout(sweep_every_s * random.uniform(0.5, 1.5)):
                        await self._fell_away.wait()
                retry_s = _LOOK_S
            else:
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
            try:
                async with self._server(is_probe=True):
                    await self.sweep()
            except RetrievalError:
                pass  # it is away still, or again
            except Exception:
                _log.exception("a sweep of the store failed")


async def find_on_server(
    config: ServerStoreConfig, collection: str, keys: Collection[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return those, of tenants and ids of texts, of which a collection has documents of any index.

    Raises:
        StoreUnavailable: The server does not answer, or refuses.
    """
    of = _connect(config, collection, VectorSpace(None, sparse=True))
    manifests = Manifests(of, config.ttl_s, time.time)
    there = set()
    try:
        with suppress(ChunksMissing):  # there is no collection
            for tenant in {tenant for tenant, _ in keys}:
                ids = [each.rpartition("/")[2] for each in await manifests.list_documents(tenant)]
                there |= {(tenant, each.rpartition("-")[0]) for each in ids}
    finally:
        await of.client.close()
    return [key for key in keys if key in there]


def _connect(config: ServerStoreConfig, collection: str, space: VectorSpace) -> QdrantCollection:
    key = config.key()
    client = AsyncQdrantClient(
        url=config.url,
        headers=None if key is None else {"api-key": key},
        timeout=int(max(1, config.timeout_s)),
        check_compatibility=False,  # it only warns; `QdrantCollection.prepare` raises
    )
    return QdrantCollection(client, collection, space, url=config.address)
