"""Embedders behind one protocol: BM25 term counts (no model weights), BGE-M3, or a small model."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rapid.catalogue import check_weights, local_path
from rapid.documents import keep_no_words
from rapid.errors import ConfigurationError
from retrieval.chunking import RetrievedChunk
from retrieval.embeddings.bge_m3 import BGEM3Embedder
from retrieval.embeddings.embedding import (
    Embedder,
    Embedding,
    SparseVector,
    VectorSpace,
    device_named,
)
from retrieval.embeddings.priority_lock import PriorityLock
from retrieval.embeddings.terms import content_terms, names, terms
from retrieval.retrieval_errors import EmbedderFailed
from retrieval.settings import BGEM3EmbedderConfig, EmbedderConfig, SentenceEmbedderConfig

_COSINE_PER_WORDS = 0.05  # what one unit of a BM25 score counts beside a cosine
_LEAST_COSINE = 0.39
_LEAST_COVERAGE = 0.5
_NAME_WEIGHT = 4  # of names and numbers: a text about another thing of the kind has the other words


def make_embedder(config: EmbedderConfig) -> Embedder:
    """Build the configured embedder, and load its model where it has one.

    Raises:
        EmbedderFailed: The model cannot be loaded.
    """
    if isinstance(config, BGEM3EmbedderConfig):
        return BGEM3Embedder(config)
    if isinstance(config, SentenceEmbedderConfig):
        return SentenceEmbedder(config)
    return LexicalEmbedder()


class LexicalEmbedder:
    """A BM25 embedder; the store supplies the IDF factor (see `VectorSpace.idf`).

    Terms are those of `retrieval.embeddings.terms`, numbered by a hash.
    """

    space = VectorSpace(dense_size=None, sparse=True, idf=True)
    floor = 0.0  # a chunk with one content word of the query is shown

    _SATURATION = 1.2  # k1
    _LENGTH_WEIGHT = 0.75  # b

    def embed_passages(self, texts: Sequence[str]) -> Iterator[Embedding]:
        """Yield term weights ``tf (k1 + 1) / (tf + k1 (1 - b + b length / average))``.

        The average is over `texts`, the chunks of one document.
        """
        counts = [Counter(terms(text)) for text in texts]
        lengths = [count.total() for count in counts]
        average = max(1.0, sum(lengths) / max(1, len(lengths)))
        for count, length in zip(counts, lengths, strict=True):
            yield Embedding(dense=None, sparse=self._weigh(count, length / average))

    def embed_query(self, text: str) -> Embedding:
        """Return the counts of the query's content words, or of all its words if it has none."""
        counts = Counter(content_terms(text))
        return Embedding(dense=None, sparse=_sparse({t: float(n) for t, n in counts.items()}))

    def is_evidence(self, query: str, chunks: Sequence[RetrievedChunk]) -> bool:
        """Return whether the chunks have half of the query's content; see `coverage`."""
        return coverage(query, [chunk.text for chunk in chunks]) >= _LEAST_COVERAGE

    def _weigh(self, counts: Counter[str], relative_length: float) -> SparseVector:
        k1, b = self._SATURATION, self._LENGTH_WEIGHT
        norm = k1 * (1 - b + b * relative_length)
        return _sparse({term: n * (k1 + 1) / (n + norm) for term, n in counts.items()})


def coverage(query: str, texts: Sequence[str]) -> float:
    """Return the share of the query's content words that the texts have together, from 0 to 1."""
    named = names(query)
    weights = {term: _NAME_WEIGHT if term in named else 1 for term in content_terms(query)}
    found = {term for text in texts for term in terms(text)}
    return sum(weights[term] for term in weights.keys() & found) / max(1, sum(weights.values()))


def _sparse(weights: dict[str, float]) -> SparseVector:
    numbered: dict[int, float] = {}
    for term, weight in weights.items():
        number = zlib.crc32(term.encode())
        numbered[number] = numbered.get(number, 0.0) + weight
    terms = tuple(sorted(numbered))
    return SparseVector(terms, tuple(numbered[term] for term in terms))


class SentenceEmbedder:
    """A sentence-transformers embedder: dense vectors (cosine), and BM25 term weights beside them.

    Weight and least cosine are those of all-MiniLM-L6-v2 (`benchmarks/results/recall-dev.md`).
    """

    floor = 0.0  # of the dense cosine

    def __init__(self, config: SentenceEmbedderConfig) -> None:
        """Load the model; importing sentence-transformers alone takes seconds.

        Raises:
            EmbedderFailed: The model is missing, has not been fetched, or cannot be loaded.
        """
        self._config = config
        self._turns = PriorityLock()
        self._words = LexicalEmbedder()
        try:
            folder = local_path(config.model)
            check_weights(config.model)
        except ConfigurationError as error:
            raise EmbedderFailed(str(error)) from error
        try:
            from sentence_transformers import SentenceTransformer

            self._model: Any = SentenceTransformer(folder, device=device_named(config.device))
        except Exception as error:
            raise EmbedderFailed(
                f"cannot load the embedder {config.model!r}: {error}. Give embedder.model a folder "
                "of sentence-transformers, or a hub name"
            ) from error
        self._model.max_seq_length = config.max_length
        keep_no_words(self._model.tokenizer)
        size = int(self._model.get_embedding_dimension())
        self.space = VectorSpace(
            dense_size=size, sparse=True, idf=True, sparse_weight=_COSINE_PER_WORDS
        )

    def embed_passages(self, texts: Sequence[str]) -> Iterator[Embedding]:
        """Embed passages, `batch_size` of them in a forward pass.

        Raises:
            EmbedderFailed: The model raised.
        """
        words = self._words.embed_passages(texts)
        step = self._config.batch_size
        for first in range(0, len(texts), step):
            with self._turns.batch():
                dense = self._dense(texts[first : first + step])
            for vector in dense:
                yield Embedding(vector, next(words).sparse)

    def embed_query(self, text: str) -> Embedding:
        """Embed a query, before any batch that waits; errors are those of `embed_passages`."""
        with self._turns.question():
            (dense,) = self._dense([text])
        return Embedding(dense, self._words.embed_query(text).sparse)

    def is_evidence(self, query: str, chunks: Sequence[RetrievedChunk]) -> bool:
        """Return whether the best cosine is at least 0.39."""
        return max((chunk.cosine or 0.0 for chunk in chunks), default=0.0) >= _LEAST_COSINE

    def _dense(self, texts: Sequence[str]) -> NDArray[np.float32]:
        try:
            vectors: NDArray[np.float32] = self._model.encode(
                list(texts), normalize_embeddings=True, show_progress_bar=False
            )
        except Exception as error:
            raise EmbedderFailed(f"the embedder failed on {len(texts)} texts: {error}") from error
        return vectors
