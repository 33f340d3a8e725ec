"""Retrieval of context from documents: chunking, embedding, storage and ranking, without Ray.

A script calls `retrieve_context`; a service opens a `Retriever` with `open_retriever`. Qdrant,
torch, FlagEmbedding and sentence-transformers are imported only where they are used.
"""

from rapid.chat_messages import Document
from retrieval.chunking import Chunk, RetrievedChunk, chunk_text, hf_token_offsets
from retrieval.composing import open_retriever, retrieve_context
from retrieval.context import RetrievalTimings, RetrievedContext
from retrieval.embeddings.bge_m3 import BGEM3Embedder
from retrieval.embeddings.embedders import LexicalEmbedder, SentenceEmbedder, make_embedder
from retrieval.embeddings.embedding import Embedder, Embedding
from retrieval.retrieval_errors import (
    ChunksMissing,
    CollectionMismatch,
    EmbedderFailed,
    RetrievalError,
    StoreUnavailable,
)
from retrieval.retriever import Retriever
from retrieval.settings import RetrievalConfig
from retrieval.stores.store import ChunkStore, StoredDocument

__all__ = [
    "BGEM3Embedder",
    "Chunk",
    "ChunkStore",
    "ChunksMissing",
    "CollectionMismatch",
    "Document",
    "Embedder",
    "EmbedderFailed",
    "Embedding",
    "LexicalEmbedder",
    "RetrievalConfig",
    "RetrievalError",
    "RetrievalTimings",
    "RetrievedChunk",
    "RetrievedContext",
    "Retriever",
    "SentenceEmbedder",
    "StoreUnavailable",
    "StoredDocument",
    "chunk_text",
    "hf_token_offsets",
    "make_embedder",
    "open_retriever",
    "retrieve_context",
]
