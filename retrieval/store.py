"""Where chunks live: a small port, and what every implementation promises.

`tests/congruence` runs the same calls on each implementation and on a plain one in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embedding import Embedding


class ChunkStore(Protocol):
    """Chunks of many tenants' documents; nothing crosses from one tenant to another.

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
            CollectionMismatch: The vectors are not of the store's space.
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
        """The tenant's best chunks within these documents, best first, exactly.

        A query with one vector gives its scores. With two, the dense and the sparse ranking are
        joined by reciprocal rank: score ``sum of 1 / (60 + rank)``, ranks from zero.

        The result is a function of the documents and the query, whatever else is or was in the
        store: equal scores are in the order of `document_ids`, then of the chunks as they were
        added, also where rankings are joined and where `limit` cuts.

        Args:
            tenant: Whose documents; the same id under another tenant is another document.
            document_ids: Where to look.
            query: Vectors of the store's space.
            limit: The most chunks to return.
            floor: Chunks that score less are left out before rankings are joined: by the dense
                score where there is one, by the sparse score otherwise. A chunk that shares no term
                with the query has no sparse score.
        """
        ...

    async def delete(self, tenant: str, document_id: str) -> None:
        """Forget a document; deleting what is not there is fine."""
        ...

    async def close(self) -> None:
        """Release connections; no call may follow."""
        ...
