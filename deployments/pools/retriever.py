"""The retriever deployment, which returns a query's chunks of a tenant's documents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deployments.logs import log_with_serve
from rapid.checkpoints.text import ChatText
from rapid.messages import Document
from retrieval import RetrievalConfig, RetrievedContext, Retriever, open_retriever


class RetrieverReplica:
    """A Serve replica that owns one `Retriever`; chunk sizes are in the target's tokens."""

    def __init__(self, retrieval: RetrievalConfig, target_model: str) -> None:
        log_with_serve()
        self._config = retrieval
        self._tokens = ChatText.load(target_model).token_offsets
        self._opening: asyncio.Task[Retriever] | None = None

    async def retrieve(
        self, tenant: str, documents: Sequence[Document], query: str, budget_tokens: int
    ) -> RetrievedContext:
        """Return the chunks of a tenant's documents for a query, in document order."""
        retriever = await self._opened()
        return await retriever.retrieve(tenant, documents, query, budget_tokens)

    async def check_health(self) -> None:
        """Check the replica; the first call opens the store and loads the embedder."""
        await self._opened()

    async def __del__(self) -> None:
        """Delete the replica's chunks from a shared store; Serve awaits this when it stops."""
        if self._opening is not None:
            await (await self._opening).close()

    async def _opened(self) -> Retriever:
        if self._opening is None:
            self._opening = asyncio.create_task(open_retriever(self._config, self._tokens))
        return await asyncio.shield(self._opening)
