"""The retriever, which indexes documents and finds the context of a question in them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rapid.errors import RetrievalPending
from rapid.messages import Document
from retrieval.chunking import Chunk, TokenOffsets, chunk_text, hf_token_offsets
from retrieval.config import RetrievalConfig, ServerStoreConfig
from retrieval.context import RetrievalTimings, RetrievedContext
from retrieval.embedders import make_embedder
from retrieval.embedding import Embedder, Embedding
from retrieval.errors import ChunksMissing, StoreUnavailable, UnknownDocument
from retrieval.ranking import select
from retrieval.store import ChunkStore, StoredDocument

_log = logging.getLogger(__name__)

_DOCUMENTS_AT_ONCE = 4
_NOTHING = StoredDocument(num_chunks=0, num_tokens=0)


@dataclass(slots=True)
class _Entry:
    """A document that is stored or being indexed.

    Attributes:
        indexing: The task that finds it in the store, or chunks, embeds and stores it.
        stored: What the store holds, nothing until it is indexed.
        users: Requests that use it now; it is not evicted before they are done.
    """

    indexing: asyncio.Task[None]
    stored: StoredDocument = _NOTHING
    users: int = 0


class Retriever:
    """A search over attached documents, which are indexed once and cached while there is room.

    A document is identified by a hash of tenant, name and text: a repeated document is not chunked
    and embedded again, and concurrent requests for a new one share its indexing. What another
    retriever has put into a shared store is found there, and what a store has lost is indexed
    again. Beyond `RetrievalConfig.cache_size` chunks the least recently used documents are
    forgotten, and are deleted from a store of this process. A retriever belongs to one event loop.

    Queries are embedded in a thread of their own, so that none waits behind documents.
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
        self._documents = ThreadPoolExecutor(_DOCUMENTS_AT_ONCE, thread_name_prefix="documents")
        self._queries = ThreadPoolExecutor(1, thread_name_prefix="queries")

    @property
    def outage(self) -> str | None:
        """Why nothing can be retrieved now; None if, as far as is known, everything can."""
        return self._store.outage

    @property
    def num_indexing(self) -> int:
        """Documents that are being indexed now."""
        return sum(not entry.indexing.done() for entry in self._entries.values())

    @property
    def num_chunks(self) -> int:
        """Chunks of the documents that this retriever knows to be stored."""
        return sum(entry.stored.num_chunks for entry in self._entries.values())

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
        wait_s: float | None = None,
    ) -> RetrievedContext:
        """Retrieve the context of a query.

        Args:
            tenant: The owner of the documents.
            documents: Texts, indexed first where they are new, or ids from `index`.
            query: The text to search for; see `choose_query`.
            budget_tokens: The most tokens of context. Defaults to the configured budget.
            wait_s: How long to wait for new documents to be indexed, in seconds. Defaults to as
                long as it takes.

        Raises:
            UnknownDocument: If an id is not, or no longer, indexed for this tenant.
            RetrievalPending: If a document is not indexed in time; its indexing goes on.
            StoreUnavailable: If the store does not answer.
            EmbedderFailed: If the embedding model raises.
        """
        began = perf_counter()
        try:
            return await self._retrieve(tenant, documents, query, budget_tokens, wait_s)
        except ChunksMissing as missing:
            _log.warning("documents are indexed again: %s", missing)
            for document in documents:
                entry = self._entries.get(_key(tenant, document))
                if entry is not None and entry.indexing.done():
                    del self._entries[_key(tenant, document)]
        left_s = None if wait_s is None else wait_s - (perf_counter() - began)
        return await self._retrieve(tenant, documents, query, budget_tokens, left_s)

    async def _retrieve(
        self,
        tenant: str,
        documents: Sequence[Document | str],
        query: str,
        budget_tokens: int | None,
        wait_s: float | None,
    ) -> RetrievedContext:
        """Retrieve once; `ChunksMissing` is raised if the store has lost chunks."""
        loop = asyncio.get_running_loop()
        began = perf_counter()
        async with self._in_use(tenant, documents, wait_s) as held:
            stored = {document_id: entry.stored for document_id, entry in held}
            ids = tuple(stored)
            budget = budget_tokens
            if budget is None:
                budget = self._config.budget_for(sum(s.num_tokens for s in stored.values()))
            limit = self._enough_for(budget, sum(s.num_chunks for s in stored.values()))
            indexed = perf_counter()
            vectors = await loop.run_in_executor(self._queries, self._embedder.embed_query, query)
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
        for threads in (self._documents, self._queries):
            threads.shutdown(wait=False, cancel_futures=True)
        await self._store.close()

    @asynccontextmanager
    async def _in_use(
        self, tenant: str, documents: Sequence[Document | str], wait_s: float | None = None
    ) -> AsyncIterator[list[tuple[str, _Entry]]]:
        """Yield the indexed documents with their ids; none is evicted within the block.

        Raises:
            RetrievalPending: If they are not indexed within `wait_s` seconds.
        """
        held: list[tuple[str, _Entry]] = []
        try:
            for document in documents:
                document_id, entry = self._entry(tenant, document)
                entry.users += 1
                held.append((document_id, entry))
            await _indexed([entry for _, entry in held], wait_s)
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
        key = _key(tenant, document)
        document_id = key[1]
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
        loop = asyncio.get_running_loop()
        try:
            async with self._store.claimed(*key) as found:
                if found is None:
                    chunks, embeddings, num_tokens = await loop.run_in_executor(
                        self._documents, self._prepare, key[1], document
                    )
                    found = await self._store.add(*key, chunks, embeddings, num_tokens)
        except BaseException:
            del self._entries[key]
            raise
        self._entries[key].stored = found

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
        excess = sum(e.stored.num_chunks for e in self._entries.values()) - self._config.cache_size
        for key, entry in list(self._entries.items())[:-1]:
            if excess <= 0:
                return
            is_unused = entry.users == 0 and entry.indexing.done()
            if is_unused and self._entries.get(key) is entry:
                excess -= entry.stored.num_chunks
                del self._entries[key]
                try:
                    await self._store.evict(*key)
                except StoreUnavailable as error:  # the current request does not depend on it
                    _log.warning("could not drop %s: %s", key[1], error)

    def _enough_for(self, budget_tokens: int, num_chunks: int) -> int:
        """Return how many chunks to search for, with a margin for short and repeated ones."""
        return max(1, min(num_chunks, 16 + 4 * budget_tokens // self._config.chunk_tokens))


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
        tokenizer: A fingerprint of the target's tokenizer, under which a shared store keeps what
            was cut by it; needed for a store on a server.

    Raises:
        ValueError: If the store is on a server and no fingerprint is given.
        EmbedderFailed: If the model cannot be loaded.
        CollectionMismatch: If the collection was made for another embedder.
    """
    if isinstance(config.store, ServerStoreConfig) and not tokenizer:
        raise ValueError("a shared store keeps chunks by their tokenizer: give its fingerprint")
    if embedder is None:
        embedder = await asyncio.to_thread(make_embedder, config.embedder)
    store: ChunkStore
    if isinstance(config.store, ServerStoreConfig):
        from retrieval.shared_store import SharedChunkStore

        index = config.index_name(tokenizer)
        store = await SharedChunkStore.open(config.store, config.collection, embedder.space, index)
    else:
        from retrieval.local_store import LocalChunkStore

        store = await LocalChunkStore.open(config.collection, embedder.space)
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


async def _indexed(entries: Sequence[_Entry], wait_s: float | None) -> None:
    """Wait until documents are indexed.

    Raises:
        RetrievalPending: If that takes longer than `wait_s` seconds.
    """
    try:
        async with asyncio.timeout(wait_s):
            for entry in entries:
                # Several requests may wait for this task, so cancelling one must not cancel it.
                await asyncio.shield(entry.indexing)
    except TimeoutError:
        raise RetrievalPending("The documents are still being indexed; ask again.") from None


def _look_at(task: asyncio.Task[None]) -> None:
    """Retrieve a task's exception, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()


def _key(tenant: str, document: Document | str) -> tuple[str, str]:
    """Return the tenant and the id of a document, which may be given by its id."""
    return tenant, document if isinstance(document, str) else _document_id(tenant, document)


def _document_id(tenant: str, document: Document) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in (tenant, document.name, document.text):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return f"doc-{digest.hexdigest()}"
