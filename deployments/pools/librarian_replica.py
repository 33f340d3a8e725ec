"""The librarian deployment, which reads, indexes and deletes the files of a library."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from ray.serve.handle import DeploymentHandle

from cluster.remote_failures import failure_of
from deployments.logs import log_with_serve
from library.ingestion import Ingestion
from library.library_access import Library
from library.library_config import LibraryConfig
from rapid.errors import LibraryUnavailable, RetrievalUnavailable
from rapid.messages import Document, DocumentRef, Reading, Tell, new_call_id

_AGAIN_S = 2.0  # between two tries to open a library that is away

logger = logging.getLogger(__name__)


class LibrarianReplica:
    """A Serve replica that works on the jobs of a library; several share them."""

    def __init__(self, config: LibraryConfig, *retrievers: DeploymentHandle) -> None:
        """Begin.

        Args:
            config: Where the library is.
            retrievers: The handles of all retrievers, each of which indexes every file.
        """
        log_with_serve()
        self._config = config
        self._index = RetrieverIndex(retrievers)
        self._running: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Answer Serve; the first call begins the work.

        A library that is away is tried again: another replica would find it away as well.
        """
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        elif self._running.done():
            await self._running  # raises what ended it

    async def _run(self) -> None:
        while True:
            try:
                library = await Library.open(self._config)
                break
            except LibraryUnavailable as error:
                logger.error("files wait: %s", error)
                await asyncio.sleep(_AGAIN_S)
        await Ingestion(library, self._index).run()


class RetrieverIndex:
    """A `library.ingestion.DocumentIndex` of all retrievers of an application."""

    def __init__(self, retrievers: Sequence[DeploymentHandle]) -> None:
        self._retrievers = retrievers

    async def index(self, tenant: str, document: Document, tell: Tell) -> None:
        """Add a document to every retriever.

        Raises:
            RetrievalUnavailable: A retriever failed or cannot be reached.
        """
        for handle in self._retrievers:
            method = handle.options(session_id=document.digest, stream=True).index
            said = method.remote(new_call_id(), tenant, document)
            try:
                await _follow(said, tell)
            except Exception as error:
                failure = failure_of(error)
                raise failure.as_rapid_error("retriever", RetrievalUnavailable) from error
            finally:
                said.cancel()

    async def forget(self, tenant: str, document: DocumentRef) -> None:
        """Delete a document from every retriever.

        Raises:
            RetrievalUnavailable: A retriever failed or cannot be reached.
        """
        for handle in self._retrievers:
            try:
                await handle.options(session_id=document.digest).forget.remote(tenant, document)
            except Exception as error:
                failure = failure_of(error)
                raise failure.as_rapid_error("retriever", RetrievalUnavailable) from error


async def _follow(said: AsyncGenerator[Reading | None], tell: Tell) -> None:
    async for each in said:
        if each is not None:
            tell(each)
