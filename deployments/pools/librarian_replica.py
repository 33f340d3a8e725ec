"""The librarian deployment, which reads, indexes and deletes the files of a library."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.remote_failures import failure_of
from cluster.serve_internals import ask_in_actor, replicas
from deployments.logs import log_with_serve
from deployments.pools.engine_actor import engines_of
from library.ingestion import Ingestion
from library.library_access import Library
from library.library_config import LibraryConfig
from rapid.chat_messages import Document, DocumentRef
from rapid.documents import forget_text
from rapid.engine_status import Erasure
from rapid.errors import LibraryUnavailable, OrchestratorLost, RetrievalUnavailable
from rapid.events import Reading, Tell
from rapid.messages import new_call_id
from retrieval import StoreUnavailable

_AGAIN_S = 2.0  # between two tries to open a library that is away
_LIBRARIAN = "librarian"  # the pool that every application with files has
_SILENT = "no answer"
_SILENT_S = 10.0  # after which a process that was told to forget is asked again later

logger = logging.getLogger(__name__)


class LibrarianReplica:
    """A Serve replica that works on the jobs of a library; several share them."""

    def __init__(
        self, config: LibraryConfig, num_retrievers: int, *handles: DeploymentHandle
    ) -> None:
        """Begin.

        Args:
            config: Where the library is.
            num_retrievers: How many of the handles are of retrievers.
            handles: Those of all retrievers, each of which indexes every file, and then of all
                orchestrators, each of which can have its targets read one.
        """
        log_with_serve()
        self._config = config
        self._index = RetrieverIndex(handles[:num_retrievers])
        self._reader = OrchestratorReader(handles[num_retrievers:])
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
        await Ingestion(library, self._index, ProcessTraces(), self._reader).run()


class RetrieverIndex:
    """A `library.ingestion.DocumentIndex` of all retrievers of an application."""

    def __init__(self, retrievers: Sequence[DeploymentHandle]) -> None:
        self._retrievers = retrievers

    async def index(self, tenant: str, document: Document, tell: Tell) -> None:
        """Add a document to every retriever.

        Raises:
            RetrievalUnavailable: A retriever or its store cannot be reached.
            RapidError: A retriever failed.
        """
        for handle in self._retrievers:
            method = handle.options(session_id=document.digest, stream=True).index
            said = method.remote(new_call_id(), tenant, document)
            try:
                await _follow(said, tell)
            except Exception as error:
                failure = failure_of(error)
                if isinstance(failure.cause, StoreUnavailable):  # which the library does not know
                    raise RetrievalUnavailable(str(failure.cause)) from error
                raise failure.as_rapid_error("retriever", RetrievalUnavailable) from error
            finally:
                said.cancel()

    async def forget(self, tenant: str, document: DocumentRef) -> list[Erasure]:
        """Delete a document from every retriever.

        Raises:
            RetrievalUnavailable: A retriever failed or cannot be reached.
        """
        return await self._ask("forget", document.digest, tenant, document)

    async def forget_text(self, tenant: str, name: str) -> list[Erasure]:
        """Delete all documents with the text of a name from every retriever; errors as above."""
        return await self._ask("forget_text", name, tenant, name)

    async def _ask(self, method: str, session_id: str, *arguments: Any) -> list[Erasure]:
        erasures: list[Erasure] = []
        for handle in self._retrievers:
            name = handle.deployment_name.lower()
            asked = handle.options(session_id=session_id, method_name=method)
            try:
                found = await asked.remote(*arguments)
            except Exception as error:
                failure = failure_of(error)
                raise failure.as_rapid_error("retriever", RetrievalUnavailable) from error
            erasures.append(replace(found, place=f"{name}: {found.place}"))
        return erasures


class OrchestratorReader:
    """A `library.ingestion.TargetReader` over the orchestrators of an application's models."""

    def __init__(self, orchestrators: Sequence[DeploymentHandle]) -> None:
        self._orchestrators = orchestrators

    async def prefill(self, tenant: str, document: DocumentRef) -> None:
        """Have a target of every model read a document.

        Raises:
            BadRequest: It does not fit a target's context.
            Overloaded: Others wait for answers.
            OrchestratorLost: An orchestrator failed or cannot be reached.
        """
        for handle in self._orchestrators:
            try:
                refusal = await handle.prefill.remote(tenant, document)
            except Exception as error:
                failure = failure_of(error)
                raise failure.as_rapid_error("orchestrator", OrchestratorLost) from error
            if refusal is not None:
                raise refusal


class ProcessTraces:
    """A `library.files.deletions.Traces` over all engines and replicas that run in this cluster.

    They are of all applications that keep files or have engines: a canary shares the library. Each
    is told by itself, as none may be left out. Applications of others in the cluster are not asked.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()  # engines that know what was deleted before they started

    async def forget(self, name: str) -> list[Erasure]:
        """Drop a text, then its KV, and return where they were looked for."""
        # In this order: who has dropped the text asks for no more of its KV.
        everybody = await asyncio.to_thread(replicas)
        engines = await asyncio.to_thread(engines_of)
        apps = {app for app, pool, _ in everybody if pool == _LIBRARIAN}
        apps |= {name.rsplit("/", 2)[0] for name in engines}
        texts = [
            _await_erasure(f"{pool} {own}", ask_in_actor(actor, forget_text, name))
            for (app, pool, own), actor in everybody.items()
            if app in apps
        ]
        erasures = [each for found in await asyncio.gather(*texts) for each in found]
        engines = await asyncio.to_thread(engines_of)
        kv = [
            _await_erasure(_place_of(own), engine.forget.remote(frozenset({name})))
            for own, engine in engines.items()
        ]
        return erasures + [each for found in await asyncio.gather(*kv) for each in found]

    async def remind(self, find: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Have engines that are new drop what they find on their disks of deleted texts."""
        engines = await asyncio.to_thread(engines_of)
        self._told &= engines.keys()
        fresh = {name: engines[name] for name in engines.keys() - self._told}
        if not fresh or not (names := frozenset(await find())):
            return
        for name, engine in fresh.items():
            erasures = await _await_erasure(name, engine.forget.remote(names))
            if not any(each.pending == _SILENT for each in erasures):
                self._told.add(name)


async def _await_erasure(place: str, call: Awaitable[Any]) -> list[Erasure]:
    """Return what a process says that it has forgotten, or that it may not have."""
    try:
        async with asyncio.timeout(_SILENT_S):
            found = await call
    except Exception as error:  # it died, starts, or is silent: the next look says which
        logger.warning("%s has not said that it forgot a text: %r", place, error)
        return [Erasure(place, pending=_SILENT)]
    each_found = [found] if isinstance(found, Erasure) else found
    return [replace(each, place=f"{place}: {each.place}") for each in each_found]


def _place_of(engine: str) -> str:
    """Return how a certificate names an engine, ``app/Deployment/id``."""
    _, pool, own = engine.rsplit("/", 2)
    return f"{pool.lower()} {own}"


async def _follow(said: AsyncGenerator[Reading | None], tell: Tell) -> None:
    async for each in said:
        if each is not None:
            tell(each)
