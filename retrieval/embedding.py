"""Embedders behind one protocol: BM25 term counts (no model weights), BGE-M3, or a small model.

Embedders block while they compute; asynchronous callers run them in a thread.
"""

from __future__ import annotations

import os
import re
import threading
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rapid.catalogue import local_path
from rapid.errors import ConfigurationError
from retrieval.config import BGEM3EmbedderConfig, EmbedderConfig, SentenceEmbedderConfig
from retrieval.errors import EmbedderFailed


@dataclass(frozen=True, slots=True)
class SparseVector:
    """Term weights.

    Attributes:
        terms: Unsigned 32-bit term numbers, each at most once.
        weights: The weight of each term.
    """

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
        sparse: Whether there are term weights.
        idf: Whether the store multiplies a query's term weights by their inverse document
            frequency. It is counted over the searched documents only: statistics of the whole
            collection would let one tenant's text change another tenant's scores.
    """

    dense_size: int | None
    sparse: bool
    idf: bool = False


class Embedder(Protocol):
    """An embedder of passages and queries into one space; safe to call from several threads."""

    @property
    def space(self) -> VectorSpace:
        """The space of its vectors, the same for passages and queries."""
        ...

    @property
    def floor(self) -> float:
        """The lowest score at which a passage counts as relevant to the query.

        It is compared with the dense score where there is one, and with the sparse score otherwise.
        """
        ...

    def embed_passages(self, texts: Sequence[str]) -> list[Embedding]:
        """Embed all chunks of one document in one call: weights may depend on their averages."""
        ...

    def embed_query(self, text: str) -> Embedding:
        """Embed a query."""
        ...


def make_embedder(config: EmbedderConfig) -> Embedder:
    """Build the configured embedder, and load its model where it has one.

    Raises:
        EmbedderFailed: If the model cannot be loaded.
    """
    if isinstance(config, BGEM3EmbedderConfig):
        return BGEM3Embedder(config)
    if isinstance(config, SentenceEmbedderConfig):
        return SentenceEmbedder(config)
    return LexicalEmbedder()


# Words that say nothing about a question's topic. Inverse document frequency cannot replace the
# list: "what" and "please" are rare in documents, and would outweigh the names in the question.
_FUNCTION_WORDS = frozenset(
    """
    a all an and any are as at be been but by can could did do does for from had has have he her his
    how i if in into is it its ll many me much my no not of on or our please re s say she should so
    some such t tell than that the their them then there these they this those to us ve was we were
    what when where which who whom whose why will with would you your
    """.split()  # noqa: SIM905
)
_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_TERM = re.compile(rf"([{_CJK}]+)|[^\W_{_CJK}]+")


class LexicalEmbedder:
    """A BM25 embedder; the store supplies the IDF factor (see `VectorSpace.idf`).

    Terms are case-folded words and numbers; scripts written without spaces (Chinese, Japanese) give
    pairs of neighbouring characters. There is no stemming, so no language is preferred. A term's
    number is a hash of it, the same in every process.

    Attributes:
        space: Term weights with IDF, no dense vectors.
        floor: Zero. Every shared term scores above it: one content word of the query is enough.
    """

    space = VectorSpace(dense_size=None, sparse=True, idf=True)
    floor = 0.0

    _SATURATION = 1.2  # k1
    _LENGTH_WEIGHT = 0.75  # b

    def embed_passages(self, texts: Sequence[str]) -> list[Embedding]:
        """Return term weights ``tf (k1 + 1) / (tf + k1 (1 - b + b length / average))``.

        The average is over `texts`, the chunks of one document.
        """
        counts = [Counter(_terms(text)) for text in texts]
        lengths = [count.total() for count in counts]
        average = max(1.0, sum(lengths) / max(1, len(lengths)))
        return [
            Embedding(dense=None, sparse=self._weigh(count, length / average))
            for count, length in zip(counts, lengths, strict=True)
        ]

    def embed_query(self, text: str) -> Embedding:
        """Return the counts of the query's content words, or of all its words if it has none."""
        terms = list(_terms(text))
        counts = Counter([term for term in terms if term not in _FUNCTION_WORDS] or terms)
        return Embedding(dense=None, sparse=_sparse({t: float(n) for t, n in counts.items()}))

    def _weigh(self, counts: Counter[str], relative_length: float) -> SparseVector:
        k1, b = self._SATURATION, self._LENGTH_WEIGHT
        norm = k1 * (1 - b + b * relative_length)
        return _sparse({term: n * (k1 + 1) / (n + norm) for term, n in counts.items()})


def _terms(text: str) -> Iterator[str]:
    for match in _TERM.finditer(unicodedata.normalize("NFKC", text).casefold()):
        run = match.group()
        if match.group(1) is None or len(run) == 1:
            yield run
        else:
            yield from (run[i : i + 2] for i in range(len(run) - 1))


def _sparse(weights: dict[str, float]) -> SparseVector:
    """Replace terms by 32-bit hashes; the weights of terms that collide are added up."""
    numbered: dict[int, float] = {}
    for term, weight in weights.items():
        number = zlib.crc32(term.encode())
        numbered[number] = numbered.get(number, 0.0) + weight
    terms = tuple(sorted(numbered))
    return SparseVector(terms, tuple(numbered[term] for term in terms))


class BGEM3Embedder:
    """A BGE-M3 embedder: dense vectors (cosine) and learned term weights from one forward pass.

    Passages are embedded in batches, each under a lock, so that a query waits for one batch and not
    for a whole document.

    Attributes:
        floor: The least dense cosine, 0.3, which is the paper's threshold.
        space: Dense vectors of the model's hidden size and term weights without IDF.
    """

    floor = 0.3

    def __init__(self, config: BGEM3EmbedderConfig) -> None:
        """Load the model; importing FlagEmbedding alone takes seconds.

        Raises:
            EmbedderFailed: If the model is missing or not in BGE-M3's format.
        """
        self._config = config
        self._lock = threading.Lock()
        try:
            import torch
            from FlagEmbedding import BGEM3FlagModel

            device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
            # One string, never a list: a list of devices starts a pool of processes.
            self._model: Any = BGEM3FlagModel(
                _checkpoint(config.model), devices=device, use_fp16=device.startswith("cuda")
            )
        except Exception as error:
            raise EmbedderFailed(
                f"cannot load the embedder {config.model!r}: {error}. "
                "Give embedder.model a folder in BGE-M3's format, or a hub name"
            ) from error
        size = int(self._model.model.model.config.hidden_size)
        self.space = VectorSpace(dense_size=size, sparse=True)

    def embed_passages(self, texts: Sequence[str]) -> list[Embedding]:
        """Embed passages, `batch_size` of them in a forward pass.

        Raises:
            EmbedderFailed: If the model raises.
        """
        step = self._config.batch_size
        batches = (list(texts[i : i + step]) for i in range(0, len(texts), step))
        return [embedding for batch in batches for embedding in self._encode(batch)]

    def embed_query(self, text: str) -> Embedding:
        """Embed a query; BGE-M3 treats queries and passages alike.

        Raises:
            EmbedderFailed: If the model raises.
        """
        return self._encode([text])[0]

    def _encode(self, texts: list[str]) -> list[Embedding]:
        try:
            with self._lock:
                encoded = self._model.encode(
                    texts,
                    batch_size=len(texts) + 1,  # a full batch would print a progress bar
                    max_length=self._config.max_length,  # the default cuts at 512, silently
                    return_dense=True,
                    return_sparse=True,
                )
        except Exception as error:
            raise EmbedderFailed(f"the embedder failed on {len(texts)} texts: {error}") from error
        return [
            Embedding(dense=np.asarray(dense, dtype=np.float32), sparse=_by_token(weights))
            for dense, weights in zip(
                encoded["dense_vecs"], encoded["lexical_weights"], strict=True
            )
        ]


class SentenceEmbedder:
    """A sentence-transformers embedder: dense vectors (cosine), and BM25 term weights beside them.

    The dense vectors find a passage that says the same in other words, the term weights find names
    and numbers, which small models confuse; the store fuses both rankings.

    Attributes:
        floor: The least dense cosine, 0.25.
        space: Dense vectors of the model's size, and term weights with IDF.
    """

    floor = 0.25

    def __init__(self, config: SentenceEmbedderConfig) -> None:
        """Load the model; importing sentence-transformers alone takes seconds.

        Raises:
            EmbedderFailed: If the model is missing, has not been fetched, or cannot be loaded.
        """
        self._config = config
        self._lock = threading.Lock()
        self._words = LexicalEmbedder()
        try:
            folder = local_path(config.model)
        except ConfigurationError as error:
            raise EmbedderFailed(str(error)) from error
        try:
            from sentence_transformers import SentenceTransformer

            self._model: Any = SentenceTransformer(folder, device=config.device)
        except Exception as error:
            raise EmbedderFailed(
                f"cannot load the embedder {config.model!r}: {error}. Give embedder.model a folder "
                "of sentence-transformers, or a hub name"
            ) from error
        self._model.max_seq_length = config.max_length
        size = int(self._model.get_embedding_dimension())
        self.space = VectorSpace(dense_size=size, sparse=True, idf=True)

    def embed_passages(self, texts: Sequence[str]) -> list[Embedding]:
        """Embed passages, `batch_size` of them in a forward pass.

        Raises:
            EmbedderFailed: If the model raises.
        """
        step = self._config.batch_size
        dense = [d for i in range(0, len(texts), step) for d in self._dense(texts[i : i + step])]
        words = self._words.embed_passages(texts)
        return [Embedding(d, each.sparse) for d, each in zip(dense, words, strict=True)]

    def embed_query(self, text: str) -> Embedding:
        """Embed a query.

        Raises:
            EmbedderFailed: If the model raises.
        """
        return Embedding(self._dense([text])[0], self._words.embed_query(text).sparse)

    def _dense(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors, [len(texts), dense_size]."""
        try:
            with self._lock:
                vectors: NDArray[np.float32] = self._model.encode(
                    list(texts), normalize_embeddings=True, show_progress_bar=False
                )
        except Exception as error:
            raise EmbedderFailed(f"the embedder failed on {len(texts)} texts: {error}") from error
        return vectors


def _checkpoint(model: str) -> str:
    """Return the folder of a model, downloaded from the hub if `model` is no local folder.

    Raises:
        FileNotFoundError: If the folder lacks one of BGE-M3's two extra weight files, for which
            FlagEmbedding would silently use random term weights.
    """
    if not os.path.isdir(model):
        from huggingface_hub import snapshot_download

        others = ["onnx/*", "imgs/*", "*.h5", "*.msgpack", "*.ot"]
        model = snapshot_download(model, ignore_patterns=others)
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        if not os.path.exists(os.path.join(model, name)):
            raise FileNotFoundError(f"{model} has no {name}")
    return model


def _by_token(weights: dict[str, float]) -> SparseVector:
    """Return FlagEmbedding's ``{"token id": weight}`` as a sparse vector."""
    terms = sorted((int(token), float(weight)) for token, weight in weights.items())
    return SparseVector(tuple(t for t, _ in terms), tuple(w for _, w in terms))
