"""The chunk store on Qdrant, inside the process (local mode) or on a server.

One collection holds all tenants, as Qdrant advises; `_scope` builds the only filter, and every
search, look-up and term statistic goes through it.

Qdrant computes scores, and this module ranks them. Qdrant orders points of equal score by whatever
else the collection holds or held, so its own top-k and fusion would not be functions of the
documents and the query alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from uuid import uuid4

from qdrant_client import AsyncQdrantClient
from qdrant_client import models as qm
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.config import ServerStoreConfig, StoreConfig
from retrieval.embedding import Embedding, VectorSpace
from retrieval.errors import CollectionMismatch, StoreUnavailable
from retrieval.ranking import rank, reciprocal_ranks

_LOCAL = ":memory:"
_DENSE = "dense"
_SPARSE = "sparse"
_POINTS_PER_UPSERT = 256  # about 6 MB of JSON at 1024 dimensions; the server accepts 32
_OLDEST_SERVER = (1, 19)  # the first whose term statistics can be limited to a tenant


class QdrantChunkStore:
    """A `ChunkStore` in one Qdrant collection.

    A store sees only the documents that it added itself (`_owner`), so that several retrievers may
    share a server and each may delete a document without affecting the others.
    """

    def __init__(
        self, client: AsyncQdrantClient, collection: str, space: VectorSpace, *, url: str
    ) -> None:
        self._client = client
        self._collection = collection
        self._space = space
        self._url = url
        self._owner = uuid4().hex
        self._point_ids: dict[tuple[str, str], list[str]] = {}
        # Local mode never frees a deleted point's slot and keeps scoring it, so ids are reused.
        self._free_point_ids: list[str] = []

    @classmethod
    async def open(cls, config: StoreConfig, collection: str, space: VectorSpace) -> Self:
        """Connect, and create the collection if it does not exist.

        Raises:
            StoreUnavailable: If the server does not answer, or refuses the key.
            CollectionMismatch: If the collection was made for other vectors, or the server is too
                old.
        """
        if not isinstance(config, ServerStoreConfig):
            store = cls(AsyncQdrantClient(_LOCAL), collection, space, url=_LOCAL)
            await store._create()
            return store
        key = config.key()
        client = AsyncQdrantClient(
            url=config.url,
            headers=None if key is None else {"api-key": key},
            timeout=int(max(1, config.timeout_s)),
            check_compatibility=False,  # it only warns; `_check_server` raises
        )
        store = cls(client, collection, space, url=config.url)
        try:
            await store._check_server()
            await store._create()
            await store._index_payload()
        except BaseException:
            await client.close()
            raise
        return store

    async def add(
        self,
        tenant: str,
        document_id: str,
        chunks: Sequence[Chunk],
        embeddings: Sequence[Embedding],
    ) -> None:
        """Add a document; if this fails, `delete` removes the chunks that were stored."""
        await self.delete(tenant, document_id)
        points = [
            qm.PointStruct(
                id=self._next_point_id(),
                vector=vectors,
                payload=_payload(tenant, self._own(document_id), chunk),
            )
            for chunk, embedding in zip(chunks, embeddings, strict=True)
            if (vectors := self._vectors(embedding))  # a chunk without vectors could not be found
        ]
        self._point_ids[tenant, document_id] = [str(point.id) for point in points]
        with self._errors_named():
            for first in range(0, len(points), _POINTS_PER_UPSERT):
                batch = points[first : first + _POINTS_PER_UPSERT]
                await self._client.upsert(self._collection, batch, wait=True)

    async def search(
        self,
        tenant: str,
        document_ids: Sequence[str],
        query: Embedding,
        *,
        limit: int,
        floor: float,
    ) -> list[RetrievedChunk]:
        """Search as `ChunkStore.search` specifies.

        A search takes two calls: one for the ids and scores of all chunks above the floor, one for
        the texts of the best.
        """
        in_order = [
            point_id
            for document_id in document_ids
            for point_id in self._point_ids.get((tenant, document_id), [])
        ]
        if not in_order or (query.dense is None and not _has_terms(query)):
            return []
        scope = self._scope(tenant, document_ids)
        queries = self._queries(query, scope, limit=len(in_order), floor=floor)
        with self._errors_named():
            responses = await self._client.query_batch_points(self._collection, queries)
        rankings = []
        for response in responses:
            scores = {str(point.id): point.score for point in response.points}
            rankings.append(rank({id_: scores[id_] for id_ in in_order if id_ in scores}))
        best = rankings[0]
        cosines = {} if query.dense is None else best
        if len(rankings) > 1:
            best = self._fuse(rankings[0], rankings[1], in_order)
        chosen = list(best)[:limit]
        payloads = await self._payloads(scope, chosen)
        return [
            _retrieved(payloads[id_], best[id_], cosines.get(id_))
            for id_ in chosen
            if id_ in payloads
        ]

    async def delete(self, tenant: str, document_id: str) -> None:
        """Delete a document's points; see `ChunkStore.delete`."""
        key = (tenant, document_id)
        ids = self._point_ids.pop(key, [])
        if not ids:
            return
        try:
            with self._errors_named():
                await self._client.delete(self._collection, qm.PointIdsList(points=list(ids)))
        except BaseException:
            self._point_ids[key] = ids + self._point_ids.get(key, [])
            raise
        self._free_point_ids.extend(ids)

    async def close(self) -> None:
        """Delete every document that this store added, then disconnect."""
        try:
            for tenant, document_id in list(self._point_ids):
                await self.delete(tenant, document_id)
        finally:
            await self._client.close()

    def _scope(self, tenant: str, document_ids: Sequence[str]) -> qm.Filter:
        """Return the filter of a tenant's documents, the only one by tenant in this module."""
        own = [self._own(document_id) for document_id in document_ids]
        return qm.Filter(
            must=[  # local mode tests them in this order, so the most selective is first
                qm.FieldCondition(key="document_id", match=qm.MatchAny(any=own)),
                qm.FieldCondition(key="tenant", match=qm.MatchValue(value=tenant)),
            ]
        )

    def _fuse(
        self, by_meaning: dict[str, float], by_words: dict[str, float], in_order: Sequence[str]
    ) -> dict[str, float]:
        """Return the scores of both searches together; only chunks with a dense score count."""
        weight = self._space.sparse_weight
        if weight is None:
            by_words = {id_: score for id_, score in by_words.items() if id_ in by_meaning}
            return reciprocal_ranks([by_meaning, by_words], in_order)
        return rank(
            {
                id_: by_meaning[id_] + weight * by_words.get(id_, 0.0)
                for id_ in in_order
                if id_ in by_meaning
            }
        )

    def _queries(
        self, query: Embedding, scope: qm.Filter, *, limit: int, floor: float
    ) -> list[qm.QueryRequest]:
        """Return a search for each vector of the query, dense first, for ids and scores only."""
        params = qm.SearchParams(
            exact=None if self._url == _LOCAL else True,  # local mode is always exact, and warns
            idf=qm.IdfCorpusParams(corpus=scope) if self._space.idf else None,
        )
        vectors: dict[str, Any] = {}
        if query.dense is not None:
            vectors[_DENSE] = query.dense.tolist()
        if _has_terms(query):
            vectors[_SPARSE] = _qdrant_sparse(query)
        return [
            qm.QueryRequest(
                query=vector,
                using=name,
                filter=scope,
                params=params,
                limit=limit,
                score_threshold=floor if place == 0 else None,
                with_payload=False,
            )
            for place, (name, vector) in enumerate(vectors.items())
        ]

    async def _payloads(self, scope: qm.Filter, point_ids: list[str]) -> dict[str, dict[str, Any]]:
        """Return payloads by point id, filtered by scope again: a freed id may have been reused."""
        if not point_ids:
            return {}
        chosen = qm.Filter(must=[qm.HasIdCondition(has_id=list(point_ids)), scope])
        with self._errors_named():
            points, _ = await self._client.scroll(
                self._collection, scroll_filter=chosen, limit=len(point_ids), with_payload=True
            )
        return {str(point.id): point.payload or {} for point in points}

    def _vectors(self, embedding: Embedding) -> dict[str, Any]:
        size = None if embedding.dense is None else len(embedding.dense)
        if size != self._space.dense_size or (embedding.sparse is not None) != self._space.sparse:
            raise CollectionMismatch(
                f"the collection {self._collection!r} holds {_describe(self._space)}, not "
                f"{_describe(VectorSpace(size, embedding.sparse is not None))}"
            )
        vectors: dict[str, Any] = {}
        if embedding.dense is not None:
            vectors[_DENSE] = embedding.dense.tolist()
        if _has_terms(embedding):
            vectors[_SPARSE] = _qdrant_sparse(embedding)
        return vectors

    def _own(self, document_id: str) -> str:
        return f"{self._owner}/{document_id}"

    def _next_point_id(self) -> str:
        return self._free_point_ids.pop() if self._free_point_ids else str(uuid4())

    async def _create(self) -> None:
        with self._errors_named():
            if not await self._client.collection_exists(self._collection):
                dense = self._space.dense_size
                modifier = qm.Modifier.IDF if self._space.idf else None
                try:
                    await self._client.create_collection(
                        self._collection,
                        vectors_config={}
                        if dense is None
                        else {_DENSE: qm.VectorParams(size=dense, distance=qm.Distance.COSINE)},
                        sparse_vectors_config={_SPARSE: qm.SparseVectorParams(modifier=modifier)}
                        if self._space.sparse
                        else None,
                    )
                except UnexpectedResponse as error:
                    if error.status_code != 409:  # 409: another retriever created it first
                        raise
            params = (await self._client.get_collection(self._collection)).config.params
        vectors = params.vectors if isinstance(params.vectors, dict) else {}
        sparse = (params.sparse_vectors or {}).get(_SPARSE)
        held = VectorSpace(
            dense_size=vectors[_DENSE].size if _DENSE in vectors else None,
            sparse=sparse is not None,
            idf=sparse is not None and sparse.modifier == qm.Modifier.IDF,
        )
        if held != self._space:
            raise CollectionMismatch(
                f"the collection {self._collection!r} at {self._url} holds {_describe(held)}, but "
                f"the embedder makes {_describe(self._space)}: choose another collection name"
            )

    async def _index_payload(self) -> None:
        """Index the filtered fields, on a server only: local mode has no such index and warns."""
        tenant = qm.KeywordIndexParams(type=qm.KeywordIndexType.KEYWORD, is_tenant=True)
        with self._errors_named():
            await self._client.create_payload_index(self._collection, "tenant", tenant)
            await self._client.create_payload_index(
                self._collection, "document_id", qm.PayloadSchemaType.KEYWORD
            )

    async def _check_server(self) -> None:
        with self._errors_named():
            version = (await self._client.info()).version
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_SERVER:
            raise CollectionMismatch(
                f"Qdrant {version} at {self._url} is too old: from 1.19 on, term statistics can be "
                "kept to a tenant; before, one tenant's text moves another's scores. Upgrade it"
            )

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except UnexpectedResponse as error:
            advice = {
                401: "it wants an API key: set store.api_key_env",
                403: "it refuses this API key: check store.api_key_env",
                404: "the collection is gone: restart the retriever",
            }.get(error.status_code or 0, error.content.decode(errors="replace")[:300])
            raise StoreUnavailable(
                f"Qdrant at {self._url} answered {error.status_code}: {advice}"
            ) from error
        except (ResponseHandlingException, QdrantException, OSError) as error:
            raise StoreUnavailable(
                f"Qdrant at {self._url} does not answer ({error}): check that it runs and that "
                "store.url is right"
            ) from error


def _payload(tenant: str, document_id: str, chunk: Chunk) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "document_id": document_id,
        "chunk_id": chunk.id,
        "document": chunk.document,
        "start": chunk.start,
        "end": chunk.end,
        "text": chunk.text,
        "num_tokens": chunk.num_tokens,
    }


def _retrieved(payload: dict[str, Any], score: float, cosine: float | None) -> RetrievedChunk:
    return RetrievedChunk(
        id=payload["chunk_id"],
        document=payload["document"],
        start=payload["start"],
        end=payload["end"],
        text=payload["text"],
        num_tokens=payload["num_tokens"],
        score=score,
        cosine=cosine,
    )


def _has_terms(embedding: Embedding) -> bool:
    return embedding.sparse is not None and len(embedding.sparse.terms) > 0


def _qdrant_sparse(embedding: Embedding) -> qm.SparseVector:
    assert embedding.sparse is not None
    return qm.SparseVector(
        indices=list(embedding.sparse.terms), values=list(embedding.sparse.weights)
    )


def _describe(space: VectorSpace) -> str:
    dense = (
        "no dense vectors" if space.dense_size is None else f"dense vectors of {space.dense_size}"
    )
    sparse = "no term weights" if not space.sparse else "term weights"
    return f"{dense} and {sparse}{' with IDF' if space.idf else ''}"
