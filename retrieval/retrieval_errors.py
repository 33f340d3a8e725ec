"""Errors that retrieval raises, after which `auto` goes on without retrieval."""

from __future__ import annotations

from rapid.errors import RapidError


class RetrievalError(RapidError):
    """Base class of this package's errors; ``str()`` is a sentence that says what to do."""


class StoreUnavailable(RetrievalError):
    """The vector store did not answer, or refused the request; a retry may help."""


class ChunksMissing(StoreUnavailable):
    """Documents of which the store has lost chunks; indexing them again helps."""


class CollectionMismatch(RetrievalError):
    """The collection or the server cannot hold this embedder's vectors; a retry never helps."""


class EmbedderFailed(RetrievalError):
    """The embedding model could not be loaded, or raised an error."""
