"""The vectors of texts, and the protocol of what computes them.

Embedders block while they compute; asynchronous callers run them in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.chunking import RetrievedChunk
from retrieval.retrieval_errors import CollectionMismatch


@dataclass(frozen=True, slots=True)
class SparseVector:
    """Weights of terms; each unsigned 32-bit number of a term comes at most once."""

    terms: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The vectors of one text: dense, sparse, or both."""

    dense: NDArray[np.float32] | None  # [dense_size], of unit length
    sparse: SparseVector | None


@dataclass(frozen=True, slots=True)
class VectorSpace:
    """The shape of an embedder's vectors, which a store must be able to hold.

    Attributes:
        dense_size: The size of the dense vectors; None where there are none.
        idf: Whether the store multiplies a query's term weights by their inverse document
            frequency, counted over the searched documents only.
        sparse_weight: What the store adds to a dense score for each unit of the sparse score; None
            fuses the two rankings by reciprocal rank. It does not count in comparisons.
    """

    dense_size: int | None
    sparse: bool
    idf: bool = False  # of a whole collection it would let tenants change each other's scores
    sparse_weight: float | None = field(default=None, compare=False)

    def describe(self) -> str:
        """Return the shape in words, for messages."""
        dense = f"dense vectors of {self.dense_size}" if self.dense_size else "no dense vectors"
        sparse = "term weights" if self.sparse else "no term weights"
        return f"{dense} and {sparse}{' with IDF' if self.idf else ''}"


def check_space(embedding: Embedding, space: VectorSpace, holder: str) -> None:
    """Check that a holder of vectors of `space` can hold these.

    Raises:
        CollectionMismatch: It cannot.
    """
    size = None if embedding.dense is None else len(embedding.dense)
    given = VectorSpace(size, embedding.sparse is not None)
    if (given.dense_size, given.sparse) != (space.dense_size, space.sparse):
        raise CollectionMismatch(f"{holder} holds {space.describe()}, not {given.describe()}")


class Embedder(Protocol):
    """An embedder of passages and queries into one space; safe to call from several threads."""

    @property
    def space(self) -> VectorSpace:
        """The space of its vectors, the same for passages and queries."""
        ...

    @property
    def floor(self) -> float:
        """The lowest score at which a passage is worth showing.

        It is compared with the dense score where there is one, and with the sparse score otherwise.
        """
        ...

    def is_evidence(self, query: str, chunks: Sequence[RetrievedChunk]) -> bool:
        """Return whether these chunks together have enough to do with the query to rely on them."""
        ...

    def embed_passages(self, texts: Sequence[str]) -> Iterable[Embedding]:
        """Embed all chunks of one document, in order; weights may depend on their averages.

        The model computes a batch only when its first embedding is taken.
        """
        ...

    def embed_query(self, text: str) -> Embedding:
        """Embed a query."""
        ...


def device_named(name: str) -> str:
    """Return a device by its name; 'auto' is a GPU if this process sees one."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
