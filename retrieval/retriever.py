"""The retriever, which indexes documents and finds the context of a question in them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rapid.messages import Document
from retrieval.chunking import Chunk, RetrievedChunk, TokenOffsets, chunk_text, hf_token_offsets
from retrieval.config import RetrievalConfig
from retrieval.embedding import Embedder, Embedding, make_embedder
from retrieval.errors import RetrievalError, StoreUnavailable, UnknownDocument
from retrieval.ranking import select
from retrieval.store import ChunkStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetrievalTimings:
    """Durations of the steps of a retrieval, in milliseconds.

    Attributes:
        index_ms: Chunking, embedding and storing; close to zero for documents already indexed.
        embed_ms: Embedding of the query.
        search_ms: The search in the store.
    """

    index_ms: float
    embed_ms: float
    search_ms: float

    @property
    def total_ms(self) -> float:
        return self.index_ms + self.embed_ms + self.search_ms


@dataclass(frozen=True, slots=True)
class RetrievedContext:
    """The context that retrieval found for a question.

    Attributes:
        chunks: The selected chunks, in document order.
        cleared_floor: Whether any chunk scored above the floor, even if it did not fit the budget.
        is_evidence: Whether the chunks have enough to do with the query to rely on them: by a
            configured floor if there is one, else by the embedder's own rule.
        budget_tokens: The most tokens of context.
        document_ids: Ids of the searched documents.
        timings: Durations of the steps.
    """

    chunks: tuple[RetrievedChunk, ...]
    cleared_floor: bool
    is_evidence: bool
    budget_tokens: int
    document_ids: tuple[str, ...]
    timings: RetrievalTimings

    @property
    def text(self) -> str:
        """The chunks joined by blank lines."""
        return "\n\n".join(chunk.text.strip() for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the chunks, at most `budget_tokens`."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(slots=True)
class _Entry:
    """A document that is stored or being indexed.

    Attributes:
        indexing: The task that chunks, embeds and stores it.
        num_tokens: Its length in tokens, zero until it is indexed.
        num_chunks: Its stored chunks, zero until it is indexed.
        users: Requests that use it now; it is not evicted before they are done.
    """

    indexing: asyncio.Task[None]
    num_tokens: int = 0
    num_chunks: int = 0
    users: int = 0


class Retriever:
    """A search over attached documents, which are indexed once and cached while there is room.

    A document is identified by a hash of tenant, name and text: a repeated document is not chunked
    and embedded again, and concurrent requests for a new one share its indexing. Beyond
    `RetrievalConfig.cache_size` chunks the least recently used documents are dropped from the
    store. A retriever belongs to one event loop.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        embedder: Embedder,
        store: ChunkStore,
        token_offsets: TokenOffsets,
    ) -> None:
        self._config = config
        self._embedder = embedder
        self._store = store
        self._token_offsets = token_offsets
        self._floor = embedder.floor if config.floor is None else config.floor
        # Keyed by tenant and document id, least recently used first.
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    async def index(self, tenant: str, documents: Sequence[Document]) -> tuple[str, ...]:
        """Index documents.

        Returns:
            Their ids, in order. A document stays indexed until the cache needs its room.

        Raises:
            RetrievalError: If a document cannot be embedded or stored; the others may have been.
        """
        async with self._in_use(tenant, documents) as held:
            return tuple(document_id for document_id, _ in held)

    async def retrieve(
        self,
        tenant: str,
        documents: Sequence[Document | str],
        query: str,
        budget_tokens: int | None = None,
    ) -> RetrievedContext:
        """Retrieve the context of a query.

        Args:
            tenant: The owner of the documents.
            documents: Texts, indexed first where they are new, or ids from `index`.
            query: The text to search for; see `choose_query`.
            budget_tokens: The most tokens of context. Defaults to the configured budget.

        Raises:
            UnknownDocument: If an id is not, or no longer, indexed for this tenant.
            StoreUnavailable: If the store does not answer.
            EmbedderFailed: If the embedding model raises.
        """
        began = perf_counter()
        async with self._in_use(tenant, documents) as held:
            entries = dict(held)
            ids = tuple(entries)
            budget = budget_tokens
            if budget is None:
                budget = self._config.budget_for(sum(e.num_tokens for e in entries.values()))
            limit = self._enough_for(budget, sum(e.num_chunks for e in entries.values()))
            indexed = perf_counter()
            vectors = await asyncio.to_thread(self._embedder.embed_query, query)
            embedded = perf_counter()
            ranked = await self._store.search(tenant, ids, vectors, limit=limit, floor=self._floor)
            searched = perf_counter()
        chunks = tuple(select(ranked, budget, ids))
        by_floor = self._config.floor is not None
        return RetrievedContext(
            chunks=chunks,
            cleared_floor=bool(ranked),
            is_evidence=bool(chunks) if by_floor else self._embedder.is_evidence(query, chunks),
            budget_tokens=budget,
            document_ids=ids,
            timings=RetrievalTimings(
                index_ms=1e3 * (indexed - began),
                embed_ms=1e3 * (embedded - indexed),
                search_ms=1e3 * (searched - embedded),
            ),
        )

    async def forget(self, tenant: str, document_id: str) -> None:
        """Delete a document from cache and store; an unknown one has no effect."""
        key = (tenant, document_id)
        entry = self._entries.get(key)
        if entry is None:
            return
        if not entry.indexing.done():
            await asyncio.wait([entry.indexing])
        if self._entries.get(key) is entry:
            del self._entries[key]
            await self._store.delete(tenant, document_id)

    async def close(self) -> None:
        """Cancel indexing in progress and close the store."""
        for entry in self._entries.values():
            entry.indexing.cancel()
        await asyncio.gather(*(e.indexing for e in self._entries.values()), return_exceptions=True)
        self._entries.clear()
        await self._store.close()

    @asynccontextmanager
    async def _in_use(
        self, tenant: str, documents: Sequence[Document | str]
    ) -> AsyncIterator[list[tuple[str, _Entry]]]:
        """Yield the indexed documents with their ids; none is evicted within the block."""
        held: list[tuple[str, _Entry]] = []
        try:
            for document in documents:
                document_id, entry = self._entry(tenant, document)
                entry.users += 1
                held.append((document_id, entry))
            for _, entry in held:
                # Several requests may wait for this task, so cancelling one must not cancel it.
                await asyncio.shield(entry.indexing)
            yield held
        finally:
            for _, entry in held:
                entry.users -= 1
            await self._make_room()

    def _entry(self, tenant: str, document: Document | str) -> tuple[str, _Entry]:
        """Return a document's id and entry, and start to index it where it is new.

        Only here is a document matched with its tenant; all other code uses the pair as a key.

        Raises:
            UnknownDocument: If `document` is an id that is not indexed for this tenant.
        """
        document_id = document if isinstance(document, str) else _document_id(tenant, document)
        key = (tenant, document_id)
        entry = self._entries.get(key)
        if entry is None:
            if isinstance(document, str):
                raise UnknownDocument(f"no document {document!r} is indexed: send its text again")
            indexing = asyncio.create_task(self._index(key, document))
            indexing.add_done_callback(_look_at)
            entry = self._entries[key] = _Entry(indexing)
        self._entries.move_to_end(key)
        return document_id, entry

    async def _index(self, key: tuple[str, str], document: Document) -> None:
        tenant, document_id = key
        try:
            chunks, embeddings, num_tokens = await asyncio.to_thread(
                self._prepare, document_id, document
            )
            await self._store.add(tenant, document_id, chunks, embeddings)
        except BaseException:
            del self._entries[key]
            with suppress(RetrievalError):
                await self._store.delete(tenant, document_id)
            raise
        entry = self._entries[key]
        entry.num_chunks, entry.num_tokens = len(chunks), num_tokens

    def _prepare(
        self, document_id: str, document: Document
    ) -> tuple[list[Chunk], list[Embedding], int]:
        """Chunk and embed a document; this blocks, so it runs in a thread."""
        chunks = chunk_text(
            document.text,
            self._token_offsets,
            max_tokens=self._config.chunk_tokens,
            max_chars=self._config.max_chunk_chars,
            document_id=document_id,
            name=document.name,
        )
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        chunks = [chunk for chunk in chunks if not chunk.text.isspace()]
        return chunks, self._embedder.embed_passages([c.text for c in chunks]), num_tokens

    async def _make_room(self) -> None:
        """Drop unused documents, least recently used first, until the rest fit the cache.

        The most recently used one stays even if it alone exceeds the cache; otherwise every
        question about it would index it again.
        """
        excess = sum(e.num_chunks for e in self._entries.values()) - self._config.cache_size
        for (tenant, document_id), entry in list(self._entries.items())[:-1]:
            if excess <= 0:
                return
            if entry.users == 0 and entry.indexing.done():
                excess -= entry.num_chunks
                try:
                    await self.forget(tenant, document_id)
                except StoreUnavailable as error:  # the current request does not depend on it
                    _log.warning("could not drop %s: %s", document_id, error)

    def _enough_for(self, budget_tokens: int, num_chunks: int) -> int:
        """Return how many chunks to search for, with a margin for short and repeated ones."""
        return max(1, min(num_chunks, 16 + 4 * budget_tokens // self._config.chunk_tokens))


async def open_retriever(
    config: RetrievalConfig, token_offsets: TokenOffsets, embedder: Embedder | None = None
) -> Retriever:
    """Open the configured embedder and store; loading an embedding model takes seconds.

    Args:
        config: Settings of retrieval.
        token_offsets: Returns the character ranges of the target's tokens.
        embedder: A loaded embedder to use instead of the configured one.

    Raises:
        EmbedderFailed: If the model cannot be loaded.
        StoreUnavailable: If the store does not answer.
        CollectionMismatch: If the collection was made for another embedder.
    """
    from retrieval.qdrant import QdrantChunkStore

    if embedder is None:
        embedder = await asyncio.to_thread(make_embedder, config.embedder)
    store = await QdrantChunkStore.open(config.store, config.collection, embedder.space)
    return Retriever(config, embedder, store, token_offsets)


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

    The call blocks until it is done, whether or not an event loop runs in this thread; in
    asynchronous code, prefer a `Retriever`.

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


def _look_at(task: asyncio.Task[None]) -> None:
    """Retrieve a task's exception, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()


def _document_id(tenant: str, document: Document) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in (tenant, document.name, document.text):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return f"doc-{digest.hexdigest()}"
