"""The protocol of chunk stores, with the contract of every implementation.

`tests/congruence` runs the same calls on each implementation and on a plain one in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embedding import Embedding


class ChunkStore(Protocol):
    """A store of many tenants' chunks, in which tenants are isolated from each other.

    Methods raise `StoreUnavailable` when the store does not answer.
    """

    async def add(
        self,
        tenant: str,
        document_id: str,
        chunks: Sequence[Chunk],
        embeddings: Sequence[Embedding],
    ) -> None:
        """Make a document's chunks searchable before returning; a document is added once.

        Raises:
            CollectionMismatch: If the vectors are not of the store's space.
        """
        ...

    async def search(
        self,
        tenant: str,
        document_ids: Sequence[str],
        query: Embedding,
        *,
        limit: int,
        floor: float,
    ) -> list[RetrievedChunk]:
        """Return the tenant's best chunks within these documents, best first, by exact search.

        A query with one vector is ranked by its scores. With two, the score is ``dense +
        sparse_weight * sparse`` (see `VectorSpace`). Where there is no such weight, the dense and
        the sparse ranking are fused by reciprocal rank: score ``sum of 1 / (60 + rank)``, ranks
        from zero.

        The result depends only on the documents and the query, whatever else is or was in the
        store: equal scores are in the order of `document_ids`, then of the chunks as they were
        added, also where rankings are fused and where `limit` cuts.

        Args:
            tenant: The owner of the documents; the same id under another tenant is another
                document.
            document_ids: The documents to search.
            query: Vectors of the store's space.
            limit: The most chunks to return.
            floor: The least score of a chunk, applied before anything is fused: to the dense score
                where there is one, to the sparse score otherwise. A chunk that shares no term with
                the query has no sparse score.
        """
        ...

    async def delete(self, tenant: str, document_id: str) -> None:
        """Delete a document; deleting one that does not exist has no effect."""
        ...

    async def close(self) -> None:
        """Release connections; no other call may follow."""
        ...
