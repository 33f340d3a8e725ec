"""The interface between the HTTP API and the application that generates its answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rapid.answering.prompt.prompt_tokens import TokenizedPrompt
from rapid.chat_messages import DocumentRef
from rapid.errors import EngineFailed
from rapid.events import GenerationEvent, Started
from rapid.messages import GenerateRequest
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.relevance import TextVectors

Tell = Callable[[GenerationEvent], None]
"""Takes what is said before an answer begins, which is how far its documents are embedded."""


@dataclass(frozen=True, slots=True)
class Running:
    """An answer that has begun.

    Attributes:
        started: The event with which it began.
        rest: The events after that one; closing this aborts the request.
        application: The application that answers, for the receipt; None where there is but one.
    """

    started: Started
    rest: AsyncGenerator[GenerationEvent]
    application: str | None = None


class GenerationService(Protocol):
    """The application behind the HTTP API: what runs its requests."""

    async def begin(self, request: GenerateRequest, tell: Tell) -> Running:
        """Begin the answer to a request; `tell` is told what is said before.

        Raises:
            RapidError: The request is refused.
        """
        ...

    async def search(
        self, tenant: str, documents: Sequence[DocumentRef], query: str, num_results: int
    ) -> Sequence[RetrievedChunk]:
        """Return the passages of documents that are nearest to a query, best first.

        Raises:
            RapidError: Nothing can be retrieved now.
        """
        ...

    async def list_chunks(
        self, tenant: str, document: DocumentRef, first: int, count: int
    ) -> Sequence[Chunk]:
        """Return some passages of a document, from the first one's number on, in order.

        Raises:
            RapidError: Nothing can be retrieved now.
        """
        ...

    async def embed(
        self, tenant: str, texts: Sequence[str], model: str | None, query: str | None = None
    ) -> TextVectors:
        """Return the vectors of texts, or how relevant they are to a query.

        Raises:
            RapidError: The embedder has another name, no dense vectors, or fails.
        """
        ...

    async def tokenize(self, request: GenerateRequest) -> TokenizedPrompt:
        """Return the tokens of a request's prompt.

        Raises:
            RapidError: It has none.
        """
        ...

    async def detokenize(self, request: GenerateRequest) -> str:
        """Return the text of a prompt of token ids.

        Raises:
            RapidError: One is beyond the vocabulary.
        """
        ...

    async def ready(self) -> dict[str, Any]:
        """Return the state of pools and engines; ``ready`` holds whether requests can be served."""
        ...


async def begin(events: AsyncGenerator[GenerationEvent], tell: Tell) -> Running:
    """Wait until an answer has begun, of whose `events` the rest is left.

    Documents may be embedded before it is known whether there is room, so `Reading` begins nothing.

    Raises:
        RapidError: The request is refused.
        EngineFailed: The answer ended without having begun.
    """
    async for event in events:
        if isinstance(event, Started):
            return Running(event, events)
        tell(event)
    raise EngineFailed("The answer ended without having begun.")
