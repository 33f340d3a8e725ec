"""Documents and a question in, the context to answer it out."""

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
from retrieval.embedding import Embedder, Embedding, LexicalEmbedder, make_embedder
from retrieval.errors import RetrievalError, StoreUnavailable, UnknownDocument
from retrieval.ranking import select
from retrieval.store import ChunkStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetrievalTimings:
    """Where the time went, in milliseconds."""

    index_ms: float
    """Chunking, embedding and storing; next to nothing for documents asked before."""
    embed_ms: float
    search_ms: float

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.index_ms + self.embed_ms + self.search_ms


@dataclass(frozen=True, slots=True)
class RetrievedContext:
    """What retrieval found for a question."""

    chunks: tuple[RetrievedChunk, ...]
    """In document order."""
    cleared_floor: bool
    """Something had to do with the question, whether or not it fitted the budget."""
    budget_tokens: int
    document_ids: tuple[str, ...]
    timings: RetrievalTimings

    @property
    def text(self) -> str:
        """The chunks joined by blank lines."""
        return "\n\n".join(chunk.text.strip() for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunks; at most `budget_tokens`."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(slots=True)
class _Entry:
    """A document in the store, or on its way there."""

    indexing: asyncio.Task[None]
    num_tokens: int = 0
    num_chunks: int = 0
    users: int = 0
    """Requests that search it now: it stays until they are done."""


class Retriever:
    """Attached documents indexed once, kept while there is room, and searched.

    A document is known by a hash of tenant, name and text: asked again, it is not chunked and
    embedded again; asked by two at once, the second waits for the first. Beyond
    `RetrievalConfig.cache_size` chunks the one unused for longest is dropped from the store. Use it
    on one event loop.
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
        # By tenant and document id; the one used last is last.
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    async def index(self, tenant: str, documents: Sequence[Document]) -> tuple[str, ...]:
        """Make documents searchable.

        Returns:
            Their ids, in order. A document stays until the cache needs its room.

        Raises:
            RetrievalError: A document could not be embedded or stored; the others may have been.
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
        """Find what a question needs.

        Args:
            tenant: Whose documents.
            documents: Texts, indexed first where they are new, or ids from `index`.
            query: What to search for; see `choose_query`.
            budget_tokens: The most tokens of context; by default the configuration's.

        Raises:
            UnknownDocument: An id that is not (or no longer) indexed for this tenant.
            StoreUnavailable: The store does not answer.
            EmbedderFailed: The embedding model raised.
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
        return RetrievedContext(
            chunks=tuple(select(ranked, budget, ids)),
            cleared_floor=bool(ranked),
            budget_tokens=budget,
            document_ids=ids,
            timings=RetrievalTimings(
                index_ms=1e3 * (indexed - began),
                embed_ms=1e3 * (embedded - indexed),
                search_ms=1e3 * (searched - embedded),
            ),
        )

    async def forget(self, tenant: str, document_id: str) -> None:
        """Drop a document; one that is not there is fine."""
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
        """Stop indexing and release the store."""
        for entry in self._entries.values():
            entry.indexing.cancel()
        await asyncio.gather(*(e.indexing for e in self._entries.values()), return_exceptions=True)
        self._entries.clear()
        await self._store.close()

    @asynccontextmanager
    async def _in_use(
        self, tenant: str, documents: Sequence[Document | str]
    ) -> AsyncIterator[list[tuple[str, _Entry]]]:
        """Documents with their ids, indexed, and staying so within the block."""
        held: list[tuple[str, _Entry]] = []
        try:
            for document in documents:
                document_id, entry = self._entry(tenant, document)
                entry.users += 1
                held.append((document_id, entry))
            for _, entry in held:
                # Others may wait for the same document: a caller who leaves must not stop it.
                await asyncio.shield(entry.indexing)
            yield held
        finally:
            for _, entry in held:
                entry.users -= 1
            await self._make_room()

    def _entry(self, tenant: str, document: Document | str) -> tuple[str, _Entry]:
        """The only place where a tenant meets a document: all else goes by the pair."""
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
        """Chunk and embed; runs in a thread."""
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
        """Drop documents nobody uses, oldest first, until the rest fits.

        The newest stays even if it is too large alone: its next question would index it again.
        """
        excess = sum(e.num_chunks for e in self._entries.values()) - self._config.cache_size
        for (tenant, document_id), entry in list(self._entries.items())[:-1]:
            if excess <= 0:
                return
            if entry.users == 0 and entry.indexing.done():
                excess -= entry.num_chunks
                try:
                    await self.forget(tenant, document_id)
                except StoreUnavailable as error:  # the answer at hand does not depend on it
                    _log.warning("could not drop %s: %s", document_id, error)

    def _enough_for(self, budget_tokens: int, num_chunks: int) -> int:
        """Chunks to ask for: some are short, some are repeats."""
        return max(1, min(num_chunks, 16 + 4 * budget_tokens // self._config.chunk_tokens))


async def open_retriever(config: RetrievalConfig, token_offsets: TokenOffsets) -> Retriever:
    """Build what the configuration names; loading an embedding model takes seconds.

    Raises:
        EmbedderFailed: The model could not be loaded.
        StoreUnavailable: The store does not answer.
        CollectionMismatch: The collection was made for another embedder.
    """
    from retrieval.qdrant import QdrantChunkStore

    embedder = await asyncio.to_thread(make_embedder, config.embedder)
    store = await QdrantChunkStore.open(config.store, config.collection, embedder.space)
    return Retriever(config, embedder, store, token_offsets)


def retrieve_context(
    text: str,
    query: str,
    *,
    tokenizer: Any,
    budget_tokens: int | None = None,
    chunk_tokens: int = 512,
    embedder: Embedder | None = None,
) -> RetrievedContext:
    """Find what a question needs in one text: everything in this process, nothing kept.

    It blocks until done, whether or not an event loop runs in this thread; under one, prefer a
    `Retriever`.

    Args:
        text: The document.
        query: What to search for.
        tokenizer: A fast Hugging Face tokenizer; the target's, so that tokens mean the same.
        budget_tokens: The most tokens of context; by default ``max(4096, document tokens / 24)``.
        chunk_tokens: The most tokens of a chunk.
        embedder: By default `LexicalEmbedder`; keep a `BGEM3Embedder` and pass it here.
    """
    embedder = embedder or LexicalEmbedder()
    config = RetrievalConfig(chunk_tokens=chunk_tokens)

    async def retrieve() -> RetrievedContext:
        from retrieval.qdrant import QdrantChunkStore

        store = await QdrantChunkStore.open(config.store, config.collection, embedder.space)
        retriever = Retriever(config, embedder, store, hf_token_offsets(tokenizer))
        try:
            documents = [Document("document", text)]
            return await retriever.retrieve("local", documents, query, budget_tokens)
        finally:
            await retriever.close()

    with ThreadPoolExecutor(max_workers=1) as thread:  # this one may already run a loop
        return thread.submit(asyncio.run, retrieve()).result()


def _look_at(task: asyncio.Task[None]) -> None:
    """Keep asyncio from reporting a failure that nobody waited for any more."""
    if not task.cancelled():
        task.exception()


def _document_id(tenant: str, document: Document) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in (tenant, document.name, document.text):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return f"doc-{digest.hexdigest()}"
