"""The retriever, which indexes documents and finds the context of a question in them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter
from weakref import WeakValueDictionary

from rapid.chat_messages import Document, DocumentRef
from rapid.documents import add_keeper
from rapid.engine_status import Erasure
from rapid.errors import RetrievalPending, UnknownDocument
from rapid.events import Tell
from rapid.threads import Threads
from retrieval.chunking import Chunk, TokenOffsets
from retrieval.context import RetrievalTimings, RetrievedContext
from retrieval.embeddings.embedding import Embedder, Embedding
from retrieval.indexing import Entry, Passages, key_of, text_id_of, wait_for
from retrieval.ranking import select
from retrieval.retrieval_errors import ChunksMissing, StoreUnavailable
from retrieval.settings import RetrievalConfig
from retrieval.stores.store import ChunkStore, is_of_text

_log = logging.getLogger(__name__)

_DOCUMENTS_AT_ONCE = 2  # more threads would keep the interpreter from health checks
_TEXTS_AT_ONCE = 16  # of a request for vectors, between two turns of tenants
_MOST_WAITING = 64  # requests: up to 64 MB of text at a million characters each


class Retriever:
    """A search over attached documents, which are indexed once and cached while there is room.

    A document is identified by a hash of tenant, name and text; concurrent requests for a new one
    share its indexing. Beyond `RetrievalConfig.max_cached_chunks` the least recently used documents
    are forgotten, and leave the memory of a store of this process. Tenants take turns at a few
    threads, a few passages at a time. A retriever belongs to one event loop.
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
        self._entries: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self._threads = Threads(_DOCUMENTS_AT_ONCE, "documents")
        self._own_turns = WeakValueDictionary[str, asyncio.Lock]()
        self._waiting = Counter[str]()  # requests that wait for documents, by tenant
        self._queries = Threads(1, "queries")
        add_keeper(self)

    @property
    def outage(self) -> str | None:
        """Why nothing can be retrieved now; None if, as far as is known, everything can."""
        return self._store.outage

    @property
    def has_dense_vectors(self) -> bool:
        """Whether its embedder makes any."""
        return self._embedder.space.dense_size is not None

    @property
    def num_indexing(self) -> int:
        """Documents that are being indexed now."""
        return sum(not entry.indexing.done() for entry in self._entries.values())

    @property
    def num_chunks(self) -> int:
        """Chunks of the documents that this retriever knows to be stored."""
        return sum(each.stored.num_chunks for each in self._entries.values() if each.stored)

    async def index(
        self, tenant: str, documents: Sequence[Document], *, tell: Tell | None = None
    ) -> tuple[str, ...]:
        """Index documents.

        `tell` is told every second how many passages are embedded.

        Returns:
            Their ids, in order. A document stays indexed until the cache needs its room.

        Raises:
            RetrievalError: If a document cannot be embedded or stored; the others may have been.
        """
        async with self._in_use(tenant, documents, tell=tell) as held:
            return tuple(document_id for document_id, _ in held)

    async def retrieve(
        self,
        tenant: str,
        documents: Sequence[DocumentRef],
        query: str,
        budget_tokens: int | None = None,
        wait_s: float | None = None,
        *,
        weight: int = 1,
        tell: Tell | None = None,
    ) -> RetrievedContext:
        """Retrieve the context of a query.

        Args:
            tenant: The owner of the documents.
            documents: New ones carry their text and are indexed first; of others a reference does.
            query: The text to search for; see `choose_query`.
            budget_tokens: The most tokens of context. Defaults to the configured budget.
            wait_s: How long to wait for new documents to be indexed, in seconds; None for no bound.
            weight: The tenant's shares of another's in the turns at indexing, from now on.
            tell: Is told every second how many passages of new documents are embedded.

        Raises:
            UnknownDocument: If a document without text is not, or no longer, indexed for this
                tenant; see `find_unknown`.
            RetrievalPending: If a document is not indexed in time, or too many requests wait for
                theirs. What is embedded of it stays for a later question.
            StoreUnavailable: If the store does not answer.
            EmbedderFailed: If the embedding model raises.
        """
        self._threads.weigh(tenant, weight)
        self._queries.weigh(tenant, weight)
        began = perf_counter()
        try:
            return await self._retrieve(tenant, documents, query, budget_tokens, wait_s, tell)
        except ChunksMissing as missing:
            self._drop_lost(tenant, documents, missing)
        left_s = None if wait_s is None else wait_s - (perf_counter() - began)
        return await self._retrieve(tenant, documents, query, budget_tokens, left_s, tell)

    def _drop_lost(
        self, tenant: str, documents: Sequence[DocumentRef], missing: ChunksMissing
    ) -> None:
        _log.warning("documents are indexed again: %s", missing)
        for document in documents:
            entry = self._entries.get(key_of(tenant, document))
            if entry is not None and entry.indexing.done():
                del self._entries[key_of(tenant, document)]

    async def _retrieve(
        self,
        tenant: str,
        documents: Sequence[DocumentRef],
        query: str,
        budget_tokens: int | None,
        wait_s: float | None,
        tell: Tell | None,
    ) -> RetrievedContext:
        began = perf_counter()
        async with self._in_use(tenant, documents, wait_s, tell) as held:
            stored = {document_id: entry.stored for document_id, entry in held if entry.stored}
            ids = tuple(stored)
            budget = budget_tokens
            if budget is None:
                budget = self._config.budget_for(sum(s.num_tokens for s in stored.values()))
            num_chunks = sum(s.num_chunks for s in stored.values())
            limit = self._enough_for(budget, num_chunks, documents)
            indexed = perf_counter()
            vectors = await self._queries.run(tenant, self._embedder.embed_query, query)
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

    async def list_chunks(
        self, tenant: str, document: DocumentRef, first: int, count: int
    ) -> list[Chunk]:
        """Return some chunks of a document, from the first one's number on, in order.

        Raises:
            UnknownDocument, StoreUnavailable, EmbedderFailed: As for `retrieve`.
        """

        async def read() -> list[Chunk]:
            async with self._in_use(tenant, [document]) as ((document_id, _),):
                return await self._store.list_chunks(tenant, document_id, first, count)

        try:
            return await read()
        except ChunksMissing as missing:
            self._drop_lost(tenant, [document], missing)
        return await read()

    async def embed(
        self, tenant: str, texts: Sequence[str], query: str | None = None
    ) -> tuple[list[Embedding], Embedding | None]:
        """Return the vectors of texts, and of a query if there is one.

        The tenant's turns are those of its documents, a few texts at a time.

        Raises:
            RetrievalPending: If too many requests wait.
            EmbedderFailed: If the embedding model raises.
        """
        found: list[Embedding] = []
        coming = iter(self._embedder.embed_passages(texts))

        def embed_some() -> bool:
            some = [*itertools.islice(coming, _TEXTS_AT_ONCE)]
            found.extend(some)
            return len(some) == _TEXTS_AT_ONCE

        with self._place(tenant):
            await self._threads.run_steps(tenant, embed_some)
        if query is None:
            return found, None
        return found, await self._queries.run(tenant, self._embedder.embed_query, query)

    async def forget_text(self, tenant: str, name: str) -> Erasure:
        """Delete all documents with a tenant's text, whatever their own names and their cut are.

        `name` is that of the text (`rapid.documents.name_text`).
        """
        text_id = text_id_of(name)
        for key in [key for key in self._entries if is_of_text(key, tenant, text_id)]:
            await self._drop(key)
        return await self._store.delete_text(tenant, text_id)

    def drop_text(self, name: str) -> Erasure:
        """Drop what is embedded of a text but not stored, as its indexing was given up.

        On any thread; see `rapid.documents.TextKeeper`. What is found here goes a moment later.
        """
        unstored = [(key, each) for key, each in [*self._entries.items()] if each.passages]
        text_id = text_id_of(name)
        found = [(key, each) for key, each in unstored if is_of_text(key, key[0], text_id)]
        for key, each in found:
            each.indexing.get_loop().call_soon_threadsafe(self._drop_given_up, key)
        num_found = sum(each.is_given_up for _, each in found)
        num_bytes = sum(each.passages.num_bytes for _, each in unstored if each.passages)
        return Erasure("texts", num_bytes, num_found, "in use" if found else None)

    def _drop_given_up(self, key: tuple[str, str]) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.is_given_up and not entry.users:
            del self._entries[key]

    async def forget(self, tenant: str, document_id: str) -> bool:
        """Delete a document from cache and store; return whether it was known here."""
        key = (tenant, document_id)
        is_known = key in self._entries
        if await self._drop(key):
            await self._store.delete(tenant, document_id)
        return is_known

    async def _drop(self, key: tuple[str, str]) -> bool:
        """Drop a document from the cache once it is indexed; return False if it came anew then."""
        entry = self._entries.get(key)
        if entry is not None and not entry.indexing.done():
            await asyncio.wait([entry.indexing])
        if self._entries.get(key) is not entry:
            return False
        self._entries.pop(key, None)
        return True

    async def close(self) -> None:
        """Cancel indexing in progress and close the store."""
        for entry in self._entries.values():
            entry.indexing.cancel()
        await asyncio.gather(*(e.indexing for e in self._entries.values()), return_exceptions=True)
        self._entries.clear()
        await asyncio.to_thread(self._threads.close)
        await asyncio.to_thread(self._queries.close)
        await self._store.close()

    @asynccontextmanager
    async def _in_use(
        self,
        tenant: str,
        documents: Sequence[DocumentRef],
        wait_s: float | None = None,
        tell: Tell | None = None,
    ) -> AsyncIterator[list[tuple[str, Entry]]]:
        """Yield the indexed documents with their ids; none is evicted within the block."""
        held: list[tuple[str, Entry]] = []
        try:
            if unknown := await self.find_unknown(tenant, documents):
                names = [each.name for each in unknown]
                raise UnknownDocument(f"no documents {names} are indexed: send their texts again")
            for document in documents:
                document_id, entry = self._entry(tenant, document)
                entry.users += 1
                held.append((document_id, entry))
            with self._line(tenant, [entry for _, entry in held]):
                await wait_for([entry for _, entry in held], wait_s, tell)
            yield held
        finally:
            for _, entry in held:
                entry.users -= 1
                if not entry.users and entry.stored is None:
                    entry.indexing.cancel()
            await self._make_room()

    @contextmanager
    def _line(self, tenant: str, entries: Sequence[Entry]) -> Iterator[None]:
        """Count a request that has to wait for documents.

        Raises:
            RetrievalPending: If there is no room for it.
        """
        if all(entry.stored is not None for entry in entries):
            yield
            return
        with self._place(tenant):
            yield

    @contextmanager
    def _place(self, tenant: str) -> Iterator[None]:
        """Count a request that has to wait, or raise RetrievalPending if there is no room."""
        # One tenant fills half of the room at most, a second one half of the rest, and so on.
        if self._waiting[tenant] >= _MOST_WAITING - self._waiting.total():
            raise RetrievalPending("Too many documents wait to be indexed; ask again later.")
        self._waiting[tenant] += 1
        try:
            yield
        finally:
            self._waiting[tenant] -= 1
            self._waiting += Counter()  # drops tenants of whom nobody waits

    async def find_unknown(
        self, tenant: str, documents: Sequence[DocumentRef]
    ) -> tuple[DocumentRef, ...]:
        """Return the documents that are not indexed for this tenant and carry no text."""
        refs = {key_of(tenant, e)[1]: e for e in documents if not isinstance(e, Document)}
        unknown = [each for each in refs if (tenant, each) not in self._entries]
        stored = await self._store.find_stored(tenant, unknown) if unknown else ()
        return tuple(refs[each] for each in unknown if each not in stored)

    def _entry(self, tenant: str, document: DocumentRef) -> tuple[str, Entry]:
        """Return a document's id and entry, and start or go on to index it where that is needed."""
        # Only here is a document matched with its tenant; all other code uses the pair as a key.
        key = key_of(tenant, document)
        entry = self._entries.get(key)
        if entry is None or (entry.is_given_up and entry.passages is None):
            # Without a text it is one that the store has.
            passages = Passages(key[1], document) if isinstance(document, Document) else None
            entry = self._entries[key] = Entry(passages, self._begin(key, passages))
        elif entry.is_given_up:
            entry.indexing = self._begin(key, entry.passages, after=entry.indexing)
        self._entries.move_to_end(key)
        return key[1], entry

    def _begin(
        self,
        key: tuple[str, str],
        passages: Passages | None,
        after: asyncio.Task[None] | None = None,
    ) -> asyncio.Task[None]:
        indexing = asyncio.create_task(self._index(key, passages, after))
        indexing.add_done_callback(functools.partial(self._end, key))
        return indexing

    def _end(self, key: tuple[str, str], indexing: asyncio.Task[None]) -> None:
        """Forget a document whose indexing failed, or was given up before it came to anything."""
        has_failed = not indexing.cancelled() and indexing.exception() is not None
        entry = self._entries.get(key)
        if entry is None or entry.indexing is not indexing or entry.stored is not None:
            return
        if has_failed or not (entry.users or entry.has_begun):
            del self._entries[key]

    async def _index(
        self, key: tuple[str, str], passages: Passages | None, after: asyncio.Task[None] | None
    ) -> None:
        """Index a document after another task; if it is cancelled, what is embedded stays."""
        if after is not None:
            await asyncio.wait([after])
        entry = self._entries[key]
        async with self._store.claim(*key) as found:
            if found is None:
                if passages is None:
                    raise UnknownDocument("it has left the store: send its text again")
                await self._embed(key[0], passages)
                found = await self._store.add(*key, *passages.findable(), passages.num_tokens)
        entry.stored, entry.passages = found, None

    async def _embed(self, tenant: str, passages: Passages) -> None:
        work = self._config, self._embedder, self._token_offsets
        turn = self._own_turns.setdefault(tenant, asyncio.Lock())
        async with turn:  # so that one tenant never has all threads
            await self._threads.run_steps(tenant, functools.partial(passages.advance, *work))

    async def _make_room(self) -> None:
        """Drop unused documents, least recently used first, until the rest fit the cache."""
        # The last used one stays, and counts as half of the cache at most: else each question about
        # it would index it again, or the first one about another document would drop it.
        most = max(1, self._config.max_cached_chunks // 2)
        sizes = {key: min(entry.num_chunks, most) for key, entry in self._entries.items()}
        excess = sum(sizes.values()) - self._config.max_cached_chunks
        for key, entry in list(self._entries.items())[:-1]:
            if excess <= 0:
                return
            is_unused = entry.users == 0 and entry.indexing.done()
            if is_unused and self._entries.get(key) is entry:
                excess -= sizes[key]
                del self._entries[key]
                try:
                    await self._store.evict(*key)
                except StoreUnavailable as error:  # the current request does not depend on it
                    _log.warning("could not drop %s: %s", key[1], error)

    def _enough_for(
        self, budget_tokens: int, num_chunks: int, documents: Sequence[DocumentRef]
    ) -> int:
        own = (each.chunk_sizes for each in documents)
        new = [each.tokens - each.overlap for each in own if each and each.overlap]
        least = min([self._config.chunk_tokens, *new])
        # With a margin for short and repeated ones.
        return max(1, min(num_chunks, 16 + 4 * budget_tokens // least))
