"""A retriever as its settings have it: with their embedder and their store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rapid.chat_messages import Document
from retrieval.chunking import TokenOffsets, hf_token_offsets
from retrieval.context import RetrievedContext
from retrieval.embeddings.embedders import make_embedder
from retrieval.embeddings.embedding import Embedder
from retrieval.indexing import text_id_of
from retrieval.retriever import Retriever
from retrieval.settings import RetrievalConfig, ServerStoreConfig
from retrieval.stores.document_files import find_in_folder
from retrieval.stores.store import ChunkStore


async def open_retriever(
    config: RetrievalConfig,
    token_offsets: TokenOffsets,
    embedder: Embedder | None = None,
    *,
    tokenizer: str = "",
) -> Retriever:
    """Open the configured embedder and store; loading an embedding model takes seconds.

    A server may be away: then nothing is retrieved until it is back (`Retriever.outage`).

    Args:
        config: Settings of retrieval.
        token_offsets: Returns the character ranges of the target's tokens.
        embedder: A loaded embedder to use instead of the configured one.
        tokenizer: A fingerprint of the target's tokenizer, under which a store keeps what was cut
            by it; needed for a store that outlives this process.

    Raises:
        ValueError: If the store is on a server or has a folder and no fingerprint is given.
        EmbedderFailed: If the model cannot be loaded.
        CollectionMismatch: If the collection was made for another embedder.
        StoreUnavailable: If the store's folder cannot be written, or another process has it.
    """
    if config.store.outlives_process and not tokenizer:
        raise ValueError("the store keeps chunks by their tokenizer: give its fingerprint")
    if embedder is None:
        embedder = await asyncio.to_thread(make_embedder, config.embedder)
    store: ChunkStore
    index = config.index_name(tokenizer)
    if isinstance(config.store, ServerStoreConfig):
        from retrieval.stores.shared_store import SharedChunkStore

        store = await SharedChunkStore.open(config.store, config.collection, embedder.space, index)
    else:
        from retrieval.stores.local_store import LocalChunkStore

        store = await asyncio.to_thread(LocalChunkStore.open, config.store, embedder.space, index)
    return Retriever(config, embedder, store, token_offsets)


async def find_texts(config: RetrievalConfig, texts: Mapping[str, str]) -> set[str]:
    """Return the names of those texts of which a store has passages, if it outlives its process.

    Args:
        config: The settings of the retrievers that use the store; they may run.
        texts: Names of texts, each with its tenant (`rapid.documents.name_text`).

    Raises:
        StoreUnavailable: The server does not answer, or refuses.
    """
    keys = {(tenant, text_id_of(name)): name for name, tenant in texts.items()}
    found: list[tuple[str, str]] = []
    if isinstance(config.store, ServerStoreConfig):
        from retrieval.stores.shared_store import find_on_server

        found = await find_on_server(config.store, config.collection, keys)
    elif config.store.folder is not None:
        found = await asyncio.to_thread(find_in_folder, Path(config.store.folder), keys)
    return {keys[each] for each in found}


def retrieve_context(
    text: str,
    query: str,
    *,
    tokenizer: Any,
    name: str = "document",
    budget_tokens: int | None = None,
    chunk_tokens: int = 512,
    embedder: Embedder | None = None,
) -> RetrievedContext:
    """Retrieve the context of a query from one text, in this process, without keeping an index.

    The call blocks until it is done; in asynchronous code, prefer a `Retriever`.

    Args:
        text: The document.
        query: The text to search for.
        tokenizer: A fast Hugging Face tokenizer: the target's, so that budgets count its tokens.
        name: The document's name, which every chunk carries and prompts state.
        budget_tokens: The most tokens of context. Defaults to ``max(4096, document tokens / 24)``.
        chunk_tokens: The most tokens of a chunk.
        embedder: Defaults to a new `LexicalEmbedder`; pass a `BGEM3Embedder` to reuse its model.
    """
    config = RetrievalConfig(chunk_tokens=chunk_tokens)

    async def retrieve() -> RetrievedContext:
        retriever = await open_retriever(config, hf_token_offsets(tokenizer), embedder)
        try:
            documents = [Document(name, text)]
            return await retriever.retrieve("local", documents, query, budget_tokens)
        finally:
            await retriever.close()

    with ThreadPoolExecutor(max_workers=1) as thread:  # the calling thread may already run a loop
        return thread.submit(asyncio.run, retrieve()).result()
