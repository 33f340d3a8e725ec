"""The port `rapid.ports.Retrieval` over Ray: calls of the retriever deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from cluster.affinity import AffinityRouter, find_router
from cluster.circuit_breaker import CIRCUITS
from cluster.remote_failures import failure_of
from rapid.chat_messages import DocumentRef
from rapid.documents import InlineDocuments
from rapid.errors import DrafterUnavailable, RapidError, RetrievalUnavailable
from rapid.events import Reading, Tell
from rapid.messages import new_call_id
from rapid.ports import DocumentResolver
from retrieval.chunking import Chunk
from retrieval.context import RetrievedContext
from retrieval.embeddings.relevance import TextVectors

_SHORT_CHARS = 2**16  # a text within Ray's 100 KB for arguments in the call, which costs no wait
_INDEXING_SHARE = 0.9  # of `retrieval_wait_s`; the rest is for the retriever's answer
_LOOK_S = 1.0  # between two looks at a retriever from which nothing comes
_SILENT_LOOKS = 5  # after which a replica that gives a sign every second is given up


class RayRetrieval:
    """A client of the retriever deployment; see `rapid.ports.Retrieval`.

    Requests about the same documents go to the same replica while that has room
    (`cluster.affinity`): it knows them, and may be indexing them now. So a long text is sent only
    where the replica does not know it.
    """

    def __init__(
        self, handle: DeploymentHandle, timeout_s: float, resolver: DocumentResolver | None = None
    ) -> None:
        """Keep the deployment's handle; `resolver` has the texts of documents without any."""
        self._handle = handle
        self._timeout_s = timeout_s
        self._resolver = resolver or InlineDocuments()

    async def retrieve(
        self,
        tenant: str,
        documents: Sequence[DocumentRef],
        query: str,
        budget_tokens: int,
        *,
        weight: int = 1,
        tell: Tell | None = None,
    ) -> RetrievedContext:
        """Return the passages that the drafter reads.

        If a replica is lost, the passages are asked for once more, which another one answers. If it
        does not take the request within seconds, another one is asked.

        Raises:
            RetrievalPending: If documents are not indexed in time; what is embedded of them stays.
            DrafterUnavailable: If the retriever fails or does not answer in time, or none of its
                replicas takes the request within seconds.
        """
        retriever = self._handle.options(session_id=affinity(tenant, documents), stream=True)
        wait_s = _INDEXING_SHARE * self._timeout_s
        call_id = new_call_id()
        sent = [each.ref if each.num_chars > _SHORT_CHARS else each for each in documents]
        is_retry = False
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    response = retriever.retrieve.remote(
                        call_id, tenant, sent, query, budget_tokens, wait_s, weight
                    )
                    found = None
                    try:
                        found = await self._follow(call_id, response, tell)
                    except Exception as error:
                        failure = failure_of(error)
                        if is_retry or not failure.is_of_one_replica:
                            raise failure.as_rapid_error("retriever", DrafterUnavailable) from None
                        is_retry = True
                    finally:
                        if found is None:
                            response.cancel()
                        if (router := self._router) is not None:
                            router.forget(call_id)
                    if isinstance(found, tuple):
                        missing = {each.ref for each in found}
                        wanted = [each for each in documents if each.ref in missing]
                        texts = iter(await self._resolver.resolve(tenant, wanted))
                        sent = [next(texts) if ref.ref in missing else ref for ref in sent]
                    elif found is not None:
                        return found
        except TimeoutError:
            raise DrafterUnavailable(f"no answer within {self._timeout_s:g} s") from None

    async def list_chunks(
        self, tenant: str, document: DocumentRef, first: int, count: int
    ) -> list[Chunk]:
        """Return some passages of a document, from the first one's number on, in order.

        Raises:
            RetrievalUnavailable: The retriever fails, or does not answer in time.
            UnknownDocument: The text of the document is not known.
        """
        method = self._handle.options(session_id=affinity(tenant, [document])).list_chunks

        async def ask(document: DocumentRef) -> list[Chunk] | None:
            asked = method.remote(new_call_id(), tenant, document, first, count)
            found: list[Chunk] | None = await self._wait(asked)
            return found

        found = await ask(document.ref)
        if found is None:
            found = await ask((await self._resolver.resolve(tenant, [document]))[0])
        return found or []

    async def embed(
        self, tenant: str, texts: Sequence[str], model: str | None, query: str | None
    ) -> TextVectors:
        """Return the vectors of texts, or how relevant they are to a query.

        Raises:
            BadRequest: The embedder has another name, or no dense vectors.
            RetrievalUnavailable: It fails, or does not answer in time.
        """
        handle = self._handle.options(session_id=tenant)
        response = handle.embed.remote(new_call_id(), tenant, tuple(texts), model, query)
        found: TextVectors | RapidError = await self._wait(response)
        if isinstance(found, RapidError):
            raise found
        return found

    async def _wait(self, response: DeploymentResponse[Any]) -> Any:
        """Return what a replica answers; it fails as `embed` does."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await response
        except TimeoutError:
            response.cancel()
            raise RetrievalUnavailable(f"No answer within {self._timeout_s:g} s.") from None
        except Exception as error:
            raise failure_of(error).as_rapid_error("retriever", RetrievalUnavailable) from None

    async def _follow(
        self,
        call_id: str,
        response: DeploymentResponseGenerator[
            Reading | RetrievedContext | tuple[DocumentRef, ...] | None
        ],
        tell: Tell | None,
    ) -> RetrievedContext | tuple[DocumentRef, ...] | None:
        """Return what a call finds, or the documents of which its replica lacks the text.

        None if the replica is silent and another one may answer.

        Raises:
            DrafterUnavailable: No replica takes the call.
        """
        while True:
            coming = asyncio.ensure_future(anext(response))
            coming.add_done_callback(lambda done: done.cancelled() or done.exception())
            num_silent = 0
            try:
                while not (await asyncio.wait({coming}, timeout=_LOOK_S))[0]:
                    if (router := self._router) is None:
                        continue
                    if (replica := router.replica_of(call_id)) is not None:
                        num_silent += 1
                        if num_silent == _SILENT_LOOKS:
                            CIRCUITS.put(replica)
                            return None
                    # The request holds a lease of the target meanwhile, which others may need.
                    elif router.is_stranded(call_id):
                        raise DrafterUnavailable("No replica of the retriever answers.")
                    elif router.can_move(call_id):
                        return None
                said = coming.result()
            finally:
                coming.cancel()
            if isinstance(said, Reading):
                if tell is not None:
                    tell(said)
            elif said is not None:
                found: RetrievedContext | tuple[DocumentRef, ...] = said
                return found

    @property
    def _router(self) -> AffinityRouter | None:
        return find_router(self._handle.deployment_id)


def affinity(tenant: str, documents: Sequence[DocumentRef]) -> str:
    """Return the name of the longest document, which is the dearest to index."""
    longest = max(documents, key=lambda each: each.num_chars)
    return blake2b(f"{tenant}\0{longest.digest}".encode(), digest_size=16).hexdigest()
