"""The orchestrator of an application, called through a Serve handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.affinity import find_router
from cluster.circuit_breaker import CIRCUITS
from cluster.remote_failures import FailureKind, failure_of
from cluster.serve_internals import handle_before_start, transport
from deployments.api.backend.readiness import Readiness
from deployments.api.backend.service import Running, Tell, begin
from rapid.answering.prompt.prompt_tokens import TokenizedPrompt
from rapid.chat_messages import Document, DocumentRef
from rapid.errors import OrchestratorLost, Overloaded, RapidError
from rapid.events import GenerationEvent
from rapid.messages import GenerateRequest
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.relevance import TextVectors

_LOOK_S = 1.0  # between two looks at an orchestrator from which nothing comes
_SILENT_LOOKS = 3  # as this process may have stood still itself, and hears the others one by one
_MOST_MOVES = 2  # of a request; one that needs more than seconds to arrive would never be taken
_MAX_GRPC_CHARS = 2**20  # up to 4 bytes each would pass gRPC's limit of 4 MiB


class RemoteOrchestrator:
    """A `GenerationService` that calls the orchestrator through a Serve handle.

    Streams use gRPC, so that requests are aborted if their ingress dies. A request too large for a
    gRPC message goes through the object store instead, and is not aborted.
    """

    def __init__(self, handle: DeploymentHandle, readiness: Readiness) -> None:
        self._handle = handle
        self._pool = handle.deployment_name.lower()
        self._readiness = readiness

    async def begin(self, request: GenerateRequest, tell: Tell) -> Running:
        """Begin the answer to a request; its end, or this call's, releases everything it holds.

        Raises:
            OrchestratorLost: If the orchestrator died or cannot be reached; a retry goes to
                another replica.
            Overloaded: If the orchestrator's queue is full.
            Exception: What the orchestrator raised, without Ray's wrappers.
        """
        return await begin(self._generate(request), tell)

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of a request; errors are as for `begin`."""
        generate = self._handle.options(
            stream=True,
            method_name="generate" if request.is_streamed else "answer",
            **transport(by_reference=_num_chars(request) > _MAX_GRPC_CHARS),
        )
        stream: Any = None
        try:
            with _failures_named():
                for num_left in reversed(range(_MOST_MOVES + 1)):
                    stream = generate.remote(request)
                    try:
                        event = await self._next(request, stream, can_move=num_left > 0)
                        break
                    except _BeginsElsewhere:
                        self._give_up(request, stream)
                while event is not None:
                    self._readiness.note_progress(self._pool)
                    if isinstance(event, RapidError):  # a refusal
                        raise event
                    yield event
                    event = await self._next(request, stream)
        finally:
            if stream is not None:
                self._give_up(request, stream)

    def _give_up(self, request: GenerateRequest, stream: Any) -> None:
        stream.cancel()
        if (router := find_router(self._handle.deployment_id)) is not None:
            router.forget(request)

    async def _next(self, request: GenerateRequest, stream: Any, *, can_move: bool = False) -> Any:
        """Return the next item of a stream, whose orchestrator is looked at while none comes.

        At the end None is returned. Only the first item may come from elsewhere, as an answer that
        has begun must not begin again.

        Raises:
            _BeginsElsewhere: No orchestrator has taken the request in time, and another one may.
            OrchestratorLost: The orchestrator that took it has fallen silent.
        """
        num_silent = 0
        coming = asyncio.ensure_future(anext(stream))
        coming.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not (await asyncio.wait({coming}, timeout=_LOOK_S))[0]:
                router = find_router(self._handle.deployment_id)
                if router is None:
                    continue
                if can_move and router.can_move(request):
                    raise _BeginsElsewhere
                replica = router.replica_of(request)
                is_silent = replica and self._readiness.is_silent(self._pool, replica)
                num_silent = num_silent + 1 if is_silent else 0
                if replica is not None and num_silent == _SILENT_LOOKS:
                    CIRCUITS.put(replica)
                    raise OrchestratorLost("The orchestrator is silent: ask again.")
            return coming.result()
        except StopAsyncIteration:
            return None
        finally:
            coming.cancel()

    async def search(
        self, tenant: str, documents: Sequence[DocumentRef], query: str, num_results: int
    ) -> Sequence[RetrievedChunk]:
        """Return the passages of documents that are nearest to a query; errors as for `begin`."""
        found: Sequence[RetrievedChunk] = await self._call(
            "search", tenant, documents, query, num_results
        )
        return found

    async def list_chunks(
        self, tenant: str, document: DocumentRef, first: int, count: int
    ) -> Sequence[Chunk]:
        """Return some passages of a document, in order; errors as for `begin`."""
        found: Sequence[Chunk] = await self._call("list_chunks", tenant, document, first, count)
        return found

    async def embed(
        self, tenant: str, texts: Sequence[str], model: str | None, query: str | None = None
    ) -> TextVectors:
        """Return the vectors of texts, or how relevant they are to a query; errors as above."""
        found: TextVectors = await self._call("embed", tenant, texts, model, query)
        return found

    async def tokenize(self, request: GenerateRequest) -> TokenizedPrompt:
        """Return the tokens of a request's prompt; errors as for `begin`."""
        found: TokenizedPrompt = await self._call("tokenize", request)
        return found

    async def detokenize(self, request: GenerateRequest) -> str:
        """Return the text of a prompt of token ids; errors as for `begin`."""
        found: str = await self._call("detokenize", request)
        return found

    async def _call(self, method: str, *arguments: Any) -> Any:
        with _failures_named():
            found = await self._handle.options(method_name=method).remote(*arguments)
            if isinstance(found, RapidError):  # a refusal
                raise found
            return found

    async def ready(self) -> dict[str, Any]:
        """Return the state of pools and engines, as this process last saw it."""
        return self._readiness.state(self._pool)

    def close(self) -> None:
        """Look no more at the application's state; answers that have begun go on."""
        self._readiness.stop()


@contextmanager
def _failures_named() -> Iterator[None]:
    """Raise errors of calls within the block as their caller is told them, without Ray's wrappers.

    Raises:
        Overloaded: The orchestrator's queue is full.
        OrchestratorLost: The orchestrator died or cannot be reached.
        Exception: What the orchestrator raised.
    """
    try:
        yield
    except Exception as error:
        failure = failure_of(error)
        if failure.kind is FailureKind.SATURATED:
            raise Overloaded("The server is busy.") from error
        if failure.is_loss:
            raise OrchestratorLost("The orchestrator was lost: ask again.") from error
        if failure.cause is not error:
            raise failure.cause from error
        raise


def _num_chars(request: GenerateRequest) -> int:
    """Return the number of characters in all texts of a request."""
    texts = [request.query or "", request.tenant, *request.stop]
    prompts = sum(map(len, request.prompts))  # a token id takes about as much as a character
    for document in request.documents:
        texts += [document.name, document.text if isinstance(document, Document) else ""]
    for message in request.messages:
        texts += [message.role, message.text, *map(str, message.tool_calls)]
    texts += map(str, request.tools.tools if request.tools else ())
    return sum(map(len, texts)) + prompts


class _BeginsElsewhere(Exception):
    """A request that no orchestrator has taken in time, while another one has room."""


def watch(application: str, targets: Mapping[str, str]) -> list[RemoteOrchestrator]:
    """Return the orchestrators of another application, which need not run yet, and watch it.

    Args:
        application: The application's name.
        targets: The pool of targets that each orchestrator needs, by the orchestrator's deployment.
    """
    readiness = Readiness(application, targets)
    readiness.start()
    handles = [handle_before_start(deployment, application) for deployment in targets]
    return [RemoteOrchestrator(handle, readiness) for handle in handles]
