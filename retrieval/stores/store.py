"""The protocol of chunk stores, with the contract of every implementation.

`tests/congruence` runs the same calls on each implementation and on a plain one in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from rapid.engine_status import Erasure
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.embedding import Embedding


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """What a store knows about a document whose chunks are all in it.

    Attributes:
        num_chunks: Its chunks, each of which a search can find.
        num_tokens: The length of the document in tokens.
    """

    num_chunks: int
    num_tokens: int


def is_of_text(key: tuple[str, str], tenant: str, text_id: str) -> bool:
    """Return whether a document, as tenant and id, is one of a tenant's text."""
    return key[0] == tenant and key[1].startswith(f"{text_id}-")


class ChunkStore(Protocol):
    """A store of many tenants' chunks, in which tenants are isolated from each other.

    Several retrievers may share a store, and then share its documents. Methods raise
    `StoreUnavailable` when the store does not answer.
    """

    @property
    def outage(self) -> str | None:
        """Why the store cannot be reached now; None if, as far as is known, it can be."""
        ...

    def claim(
        self, tenant: str, document_id: str
    ) -> AbstractAsyncContextManager[StoredDocument | None]:
        """Enter with the document if it is stored, or else with None and the claim to add it.

        Others wait for the one retriever that has the claim. A retriever that dies loses its
        claims. If the block fails, the document counts as not stored.
        """
        ...

    async def find_stored(self, tenant: str, document_ids: Collection[str]) -> set[str]:
        """Return which of some documents are stored, in memory or elsewhere."""
        ...

    async def add(
        self,
        tenant: str,
        document_id: str,
        chunks: Sequence[Chunk],
        embeddings: Sequence[Embedding],
        num_tokens: int,
    ) -> StoredDocument:
        """Make a document's chunks searchable before returning; the caller holds its claim.

        Each of them has a vector, and they are numbered without gaps.

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
            limit: The most chunks to return.
            floor: The least score of a chunk, applied before anything is fused: to the dense score
                where there is one, to the sparse score otherwise. A chunk that shares no term with
                the query has no sparse score.

        Raises:
            ChunksMissing: The store has lost chunks of documents that were in it. From then on
                they count as not stored.
        """
        ...

    async def list_chunks(
        self, tenant: str, document_id: str, first: int, count: int
    ) -> list[Chunk]:
        """Return some chunks of a stored document, from the first one's number on, in order.

        Raises:
            ChunksMissing: See `search`.
        """
        ...

    async def evict(self, tenant: str, document_id: str) -> None:
        """Make room for other documents.

        It leaves this process's memory; a disk or a server may keep it.
        """
        ...

    async def delete(self, tenant: str, document_id: str) -> None:
        """Delete a document; deleting one that does not exist has no effect."""
        ...

    async def delete_text(self, tenant: str, text_id: str) -> Erasure:
        """Delete all documents whose ids begin with this and a dash, of every index."""
        ...

    async def close(self) -> None:
        """Release connections; no other call may follow."""
        ...
