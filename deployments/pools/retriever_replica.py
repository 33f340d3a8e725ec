"""The retriever deployment, which returns a query's chunks of a tenant's documents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from deployments.logs import log_with_serve
from deployments.metrics import RetrieverMetrics
from library.accounts.callers import TENANT
from rapid.chat_messages import Document, DocumentRef
from rapid.checkpoints.text import ChatText
from rapid.engine_status import Erasure
from rapid.errors import (
    BadRequest,
    RapidError,
    RetrievalPending,
    RetrievalUnavailable,
    UnknownDocument,
    UnknownModel,
)
from rapid.events import Reading
from retrieval import (
    EmbedderFailed,
    RetrievalConfig,
    RetrievalError,
    RetrievedContext,
    Retriever,
    open_retriever,
)
from retrieval.chunking import Chunk
from retrieval.embeddings.relevance import TextVectors, name_embedder, score_relevance
from retrieval.indexing import key_of

logger = logging.getLogger(__name__)

SIGN_EVERY_S = 1.0  # between two signs of life in a call's stream, where nothing else is said


class RetrieverReplica:
    """A Serve replica that owns one `Retriever`; chunk sizes are in the target's tokens.

    With a store on a server, all replicas share what any of them has indexed. A server that is away
    costs retrieval alone: the replica is healthy, refuses at once, and finds out by itself when the
    server is back.
    """

    def __init__(
        self, retrieval: RetrievalConfig, target_model: str, model_name: str = "rapid"
    ) -> None:
        log_with_serve()
        self._metrics = RetrieverMetrics(model_name)
        self._config = retrieval
        self._text = ChatText.load(target_model)
        self._opening: asyncio.Task[Retriever] | None = None

    async def retrieve(
        self,
        call_id: str,
        tenant: str,
        documents: Sequence[DocumentRef],
        query: str,
        budget_tokens: int,
        wait_s: float,
        weight: int = 1,
    ) -> AsyncGenerator[Reading | RetrievedContext | tuple[DocumentRef, ...] | None]:
        """Yield how far the indexing of new documents is, and then the chunks for a query.

        None is a sign of life, once a second where nothing else is said. The chunks are a tenant's,
        in document order. Where documents are unknown and carry no text, these come instead, in a
        tuple: the call may be made again with their texts. Documents that are not indexed within
        `wait_s` seconds raise `RetrievalPending`; what is embedded of them stays. Whoever closes
        the stream waits for nothing more. Errors of the embedder and of the store say here, in this
        replica's log, what they were told: that can be an address, a path, or a server's reply.

        Args:
            call_id: Unique id, by which the pool's router knows the call (`cluster.affinity.Call`).
            weight: The tenant's shares of another's in the turns at indexing, from now on.

        Raises:
            RetrievalPending: If documents are not indexed in time.
            RetrievalError: If the embedder or the store failed; without their words.
        """
        TENANT.set(tenant)
        news = asyncio.Queue[Reading | None]()

        async def find() -> RetrievedContext:
            retriever = await self._open()
            asked = tenant, documents, query, budget_tokens, wait_s
            return await retriever.retrieve(*asked, weight=weight, tell=news.put_nowait)

        finding = asyncio.create_task(find())
        finding.add_done_callback(lambda _: news.put_nowait(None))
        try:
            with self._metrics.question():
                async for said in _with_signs(news):
                    yield said
                found = finding.result()
            times = found.timings
            self._metrics.observe(times.index_ms / 1e3, (times.embed_ms + times.search_ms) / 1e3)
            yield found
        except UnknownDocument:
            yield await (await self._open()).find_unknown(tenant, documents)
        except RetrievalError as error:
            raise self._failure(error) from None
        finally:
            finding.cancel()
            await asyncio.wait({finding})

    async def list_chunks(
        self, call_id: str, tenant: str, document: DocumentRef, first: int, count: int
    ) -> list[Chunk] | None:
        """Return some chunks of a document in order; None if it is unknown and carries no text.

        Raises:
            RetrievalError: As for `retrieve`.
        """
        TENANT.set(tenant)
        try:
            return await (await self._open()).list_chunks(tenant, document, first, count)
        except UnknownDocument:
            return None
        except RetrievalError as error:
            raise self._failure(error) from None

    async def index(
        self, call_id: str, tenant: str, document: Document
    ) -> AsyncGenerator[Reading | None]:
        """Index a document and yield how far that is, and None as a sign of life.

        Raises:
            RetrievalError: As for `retrieve`.
        """
        TENANT.set(tenant)
        news = asyncio.Queue[Reading | None]()

        async def index() -> None:
            await (await self._open()).index(tenant, [document], tell=news.put_nowait)

        indexing = asyncio.create_task(index())
        indexing.add_done_callback(lambda _: news.put_nowait(None))
        try:
            async for said in _with_signs(news):
                yield said
            indexing.result()
        except RetrievalError as error:
            raise self._failure(error) from None
        finally:
            indexing.cancel()
            await asyncio.wait({indexing})

    async def embed(
        self,
        call_id: str,
        tenant: str,
        texts: Sequence[str],
        model: str | None,
        query: str | None = None,
    ) -> TextVectors | RapidError:
        """Return the vectors of texts, or how relevant they are to a query; or why not."""
        TENANT.set(tenant)
        name = name_embedder(self._config.embedder)
        if model not in (None, name):
            return UnknownModel(
                f"The model {model!r} does not exist: texts are embedded by {name!r}."
            )
        try:
            retriever = await self._open()
            if query is None and not retriever.has_dense_vectors:
                return BadRequest(
                    f"The embedder {name!r} has no dense vectors: configure another, or use "
                    "/v1/rerank.",
                    "model",
                    "unsupported",
                )
            found, asked = await retriever.embed(tenant, texts, query)
        except RetrievalPending as error:
            return error
        except RetrievalError as error:
            return RetrievalUnavailable(str(self._failure(error)))

        def summarize() -> TextVectors:
            count = self._text.count_tokens
            num_tokens = sum(map(count, texts)) + (count(query) if query else 0)
            scores = () if asked is None else score_relevance(asked, found)
            dense = [each.dense for each in found if each.dense is not None]
            vectors = np.stack(dense) if asked is None else np.zeros((0, 0), np.float32)
            return TextVectors(name, vectors, scores, num_tokens)

        return await asyncio.to_thread(summarize)

    async def forget(self, tenant: str, document: DocumentRef) -> Erasure:
        """Delete a document's passages."""
        TENANT.set(tenant)
        try:
            found = await (await self._open()).forget(*key_of(tenant, document))
            return Erasure("passages of this name", num_found=int(found))
        except RetrievalError as error:
            raise self._failure(error) from None

    async def forget_text(self, tenant: str, name: str) -> Erasure:
        """Delete the passages of all documents with a text of this name."""
        TENANT.set(tenant)
        try:
            return await (await self._open()).forget_text(tenant, name)
        except RetrievalError as error:
            raise self._failure(error) from None

    async def status(self) -> dict[str, Any]:
        """Return whether anything can be retrieved, and why not; the reason names the server."""
        outage = (await self._open()).outage
        return {"is_away": outage is not None, "outage": outage}

    async def check_health(self) -> None:
        """Check the replica; the first call loads the embedder and opens the store."""
        retriever = await self._open()
        self._metrics.report(
            retriever.num_indexing, retriever.num_chunks, is_away=retriever.outage is not None
        )

    async def __del__(self) -> None:
        """Disconnect from the store; Serve awaits this when the replica stops."""
        if self._opening is not None:
            await (await self._opening).close()

    @staticmethod
    def _failure(error: RetrievalError) -> RetrievalError:
        logger.warning("the retriever failed: %s: %s", type(error).__name__, error)
        what = "The embedder" if isinstance(error, EmbedderFailed) else "The store of chunks"
        return type(error)(f"{what} failed; the retriever's log says why.")

    async def _open(self) -> Retriever:
        if self._opening is None:
            opening = open_retriever(
                self._config, self._text.token_offsets, tokenizer=self._text.fingerprint
            )
            self._opening = asyncio.create_task(opening)
        return await asyncio.shield(self._opening)


async def _with_signs(news: asyncio.Queue[Reading | None]) -> AsyncGenerator[Reading | None]:
    """Yield what is put into a queue until that is None, and None where nothing comes in time."""
    while True:
        try:
            async with asyncio.timeout(SIGN_EVERY_S):
                said = await news.get()
        except TimeoutError:
            yield None
            continue
        if said is None:
            return
        yield said
