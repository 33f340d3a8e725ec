"""One Qdrant collection on a server, with the chunks of all tenants, as Qdrant advises.

`_scope` builds the only filter by tenant, and every search, look-up, count and term statistic goes
through it. Qdrant computes scores, and this module ranks them: Qdrant orders points of equal score
by whatever else the collection holds or held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import numpy as np
from qdrant_client import AsyncQdrantClient
from qdrant_client import models as qm
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.embedding import Embedding, VectorSpace, check_space
from retrieval.ranking import NOT_FOUND, fuse, rank
from retrieval.retrieval_errors import ChunksMissing, CollectionMismatch, StoreUnavailable
from retrieval.settings import OLDEST_QDRANT

_DENSE = "dense"
_SPARSE = "sparse"
_POINTS_PER_UPSERT = 256  # about 6 MB of JSON at 1024 dimensions; the server accepts 32
_INDEXED = {  # fields that filters name, beside the tenant
    "document_id": qm.PayloadSchemaType.KEYWORD,
    "expires_at": qm.PayloadSchemaType.FLOAT,
}
# A chunk beside its id; points from before there were overlaps lack the last one.
_CONTENT = ("document", "start", "end", "text", "num_tokens", "first_token")


class QdrantCollection:
    """A Qdrant collection of chunks, and exact searches in documents of one tenant."""

    def __init__(
        self, client: AsyncQdrantClient, name: str, space: VectorSpace, *, url: str
    ) -> None:
        self.client = client
        self.name = name
        self.url = url
        self._space = space

    async def prepare(self) -> None:
        """Check the server, and create the collection and its indexes if they do not exist.

        Raises:
            StoreUnavailable: The server does not answer, or refuses the key.
            CollectionMismatch: The collection was made for other vectors, or the server is too old.
        """
        await self._check_server()
        await self._create()
        await self._index_payload()

    def points(
        self,
        tenant: str,
        document_id: str,
        chunks: Sequence[Chunk],
        embeddings: Sequence[Embedding],
        ids: Iterable[str],
    ) -> list[qm.PointStruct]:
        """Return the points of a document, in order, with ids from `ids`.

        Raises:
            CollectionMismatch: The vectors are not of the collection's space.
        """
        for embedding in embeddings:
            check_space(embedding, self._space, f"the collection {self.name!r}")
        return [
            qm.PointStruct(
                id=id_, vector=_vectors(each), payload=_payload(tenant, document_id, chunk)
            )
            for chunk, each, id_ in zip(chunks, embeddings, ids, strict=True)
        ]

    async def upsert(self, points: Sequence[qm.PointStruct]) -> None:
        """Store points in requests that the server accepts; others are not replaced."""
        with self.errors_named():
            for first in range(0, len(points), _POINTS_PER_UPSERT):
                batch = list(points[first : first + _POINTS_PER_UPSERT])
                await self.client.upsert(self.name, batch, wait=True)

    async def search(
        self,
        tenant: str,
        documents: Mapping[str, Sequence[str]],
        query: Embedding,
        *,
        limit: int,
        floor: float,
    ) -> list[RetrievedChunk]:
        """Search as `ChunkStore.search` does, in documents given with their points in order."""
        in_order = list(chain.from_iterable(documents.values()))
        vectors = _vectors(query)
        if not in_order or not vectors:
            return []
        scope = self._scope(tenant, documents)
        queries = self._queries(vectors, scope, limit=len(in_order), floor=floor)
        with self.errors_named():
            responses = await self.client.query_batch_points(self.name, queries)
        rankings = []
        for response in responses:
            found = {str(point.id): point.score for point in response.points}
            rankings.append(rank(np.array([found.get(id_, NOT_FOUND) for id_ in in_order])))
        best = rankings[0]
        cosines = {} if query.dense is None else best.by_name(in_order)
        if len(rankings) > 1:
            weight = self._space.sparse_weight
            best = fuse(rankings[0], rankings[1], len(in_order), weight, limit)
        chosen = dict(islice(best.by_name(in_order).items(), limit))
        payloads = await self._payloads(scope, list(chosen))
        kept = [id_ for id_ in chosen if id_ in payloads]
        return [_to_chunk(payloads[id_], chosen[id_], cosines.get(id_)) for id_ in kept]

    async def read_chunks(
        self, tenant: str, document_id: str, point_ids: Sequence[str]
    ) -> list[Chunk]:
        """Return the chunks of some points of a document that are there, in order."""
        payloads = await self._payloads(self._scope(tenant, [document_id]), list(point_ids))
        found = (payloads[id_] for id_ in point_ids if id_ in payloads)
        return [Chunk(each["chunk_id"], **_content_of(each)) for each in found]

    async def count(self, tenant: str, documents: Iterable[str]) -> int:
        """Return how many chunks of a tenant's documents the collection holds."""
        with self.errors_named():
            scope = self._scope(tenant, documents)
            return (await self.client.count(self.name, scope, exact=True)).count

    async def delete(self, tenant: str, document_id: str) -> None:
        """Delete all chunks of a document."""
        with self.errors_named():
            scope = self._scope(tenant, [document_id])
            await self.client.delete(self.name, qm.FilterSelector(filter=scope))

    def _scope(self, tenant: str, documents: Iterable[str]) -> qm.Filter:
        """Return the filter of a tenant's documents, the only one by tenant in this module."""
        return qm.Filter(
            must=[
                qm.FieldCondition(key="document_id", match=qm.MatchAny(any=list(documents))),
                qm.FieldCondition(key="tenant", match=qm.MatchValue(value=tenant)),
            ]
        )

    def _queries(
        self, vectors: Mapping[str, Any], scope: qm.Filter, *, limit: int, floor: float
    ) -> list[qm.QueryRequest]:
        idf = qm.IdfCorpusParams(corpus=scope) if self._space.idf else None
        params = qm.SearchParams(exact=True, idf=idf)
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
        with self.errors_named():
            points, _ = await self.client.scroll(
                self.name, scroll_filter=chosen, limit=len(point_ids), with_payload=True
            )
        return {str(point.id): point.payload or {} for point in points}

    async def _create(self) -> None:
        with self.errors_named():
            if not await self.client.collection_exists(self.name):
                dense = self._space.dense_size
                modifier = qm.Modifier.IDF if self._space.idf else None
                by_words = {_SPARSE: qm.SparseVectorParams(modifier=modifier)}
                try:
                    await self.client.create_collection(
                        self.name,
                        vectors_config={}
                        if dense is None
                        else {_DENSE: qm.VectorParams(size=dense, distance=qm.Distance.COSINE)},
                        sparse_vectors_config=by_words if self._space.sparse else None,
                        hnsw_config=qm.HnswConfigDiff(m=0),  # no graph: searches are exact
                    )
                except UnexpectedResponse as error:
                    if error.status_code != 409:  # 409: another retriever created it first
                        raise
            params = (await self.client.get_collection(self.name)).config.params
        vectors = params.vectors if isinstance(params.vectors, dict) else {}
        sparse = (params.sparse_vectors or {}).get(_SPARSE)
        held = VectorSpace(
            dense_size=vectors[_DENSE].size if _DENSE in vectors else None,
            sparse=sparse is not None,
            idf=sparse is not None and sparse.modifier == qm.Modifier.IDF,
        )
        if held != self._space:
            raise CollectionMismatch(
                f"the collection {self.name!r} at {self.url} holds {held.describe()}, but "
                f"the embedder makes {self._space.describe()}: choose another collection name"
            )

    async def _index_payload(self) -> None:
        tenant = qm.KeywordIndexParams(type=qm.KeywordIndexType.KEYWORD, is_tenant=True)
        with self.errors_named():
            await self.client.create_payload_index(self.name, "tenant", tenant)
            for field, schema in _INDEXED.items():
                await self.client.create_payload_index(self.name, field, schema)

    async def _check_server(self) -> None:
        with self.errors_named():
            version = (await self.client.info()).version
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_QDRANT:
            raise CollectionMismatch(
                f"Qdrant {version} at {self.url} is too old: from 1.19 on, term statistics can be "
                "kept to a tenant; before, one tenant's text moves another's scores. Upgrade it"
            )

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Raise errors of the client within the block as errors of the store.

        Raises:
            ChunksMissing: The collection is gone.
            StoreUnavailable: Qdrant does not answer, or refuses.
        """
        try:
            yield
        except UnexpectedResponse as error:
            if error.status_code == 404:
                raise ChunksMissing(
                    f"Qdrant at {self.url} has no collection {self.name!r} any more"
                ) from error
            advice = {
                401: "it wants an API key: set store.api_key_env",
                403: "it refuses this API key: check store.api_key_env",
            }.get(error.status_code or 0, error.content.decode(errors="replace")[:300])
            raise StoreUnavailable(
                f"Qdrant at {self.url} answered {error.status_code}: {advice}"
            ) from error
        except (ResponseHandlingException, QdrantException, OSError) as error:
            raise StoreUnavailable(
                f"Qdrant at {self.url} does not answer ({error}): check that it runs and that "
                "store.url is right"
            ) from error


def _payload(tenant: str, document_id: str, chunk: Chunk) -> dict[str, Any]:
    content = {name: getattr(chunk, name) for name in _CONTENT}
    return {"tenant": tenant, "document_id": document_id, "chunk_id": chunk.id, **content}


def _to_chunk(payload: dict[str, Any], score: float, cosine: float | None) -> RetrievedChunk:
    return RetrievedChunk(payload["chunk_id"], **_content_of(payload), score=score, cosine=cosine)


def _content_of(payload: dict[str, Any]) -> dict[str, Any]:
    return {name: payload[name] for name in _CONTENT if name in payload}


def _vectors(embedding: Embedding) -> dict[str, Any]:
    """Return the vectors of an embedding by their names in the collection; no terms are none."""
    vectors: dict[str, Any] = {}
    if embedding.dense is not None:
        vectors[_DENSE] = embedding.dense.tolist()
    if (sparse := embedding.sparse) is not None and sparse.terms:
        vectors[_SPARSE] = qm.SparseVector(indices=sparse.terms, values=sparse.weights)
    return vectors
