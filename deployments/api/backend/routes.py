"""The services of an application's models, and another version beside them by share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Protocol

from deployments.api.backend.service import GenerationService, Running, Tell
from deployments.config.api_config import CanaryConfig
from rapid.answering.leases.document_keys import affinity_of
from rapid.answering.prompt.prompt_tokens import TokenizedPrompt
from rapid.chat_messages import DocumentRef
from rapid.errors import OrchestratorLost, Overloaded, TargetUnavailable
from rapid.messages import GenerateRequest
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.relevance import TextVectors


class WatchedService(GenerationService, Protocol):
    """A model of another application, whose signs of life are looked at until it is closed."""

    def close(self) -> None:
        """Look no more."""
        ...


Watch = Callable[[str], Sequence[WatchedService]]
"""Function from an application's name to its models' services; the application need not run."""


class Routes:
    """A `GenerationService` that sends each request to a service of the model that it names.

    A share of the requests may go to the same model of another application. Receipts name the
    application that answered while there are two. What the other one cannot begin, because it is
    not ready or full, is answered by this one.
    """

    def __init__(self, own: Sequence[GenerationService], own_name: str, watch: Watch) -> None:
        """Create the service, which has no model before `configure`.

        Args:
            own: The service of each model of the application that this ingress belongs to.
            own_name: The application's name.
            watch: Begins to look at another application, which is ready once it is seen to be.
        """
        self._own, self._own_name, self._watch = own, own_name, watch
        self._canary: CanaryConfig | None = None
        self._others: Sequence[WatchedService] = ()
        self._models: Sequence[str] = ()
        self._at: dict[str, int] = {}

    def configure(self, models: Sequence[str], canary: CanaryConfig | None = None) -> None:
        """Take the models' names, in the order of their services, and another version or none."""
        name = canary.application if canary else None
        if name != (self._canary.application if self._canary else None):
            for other in self._others:
                other.close()
            self._others = self._watch(name) if name else ()
        self._canary, self._models = canary, models
        # An earlier name stays that of answers that have begun, as they may begin again elsewhere.
        self._at |= {model: at for at, model in enumerate(models)}

    async def begin(self, request: GenerateRequest, tell: Tell) -> Running:
        """Begin the answer to a request, at the service that its model and its share pick."""
        canary, at = self._canary, self._at[request.model]
        own, other = self._own[at], self._others[at] if canary else None
        if canary and other and position(request) < canary.share and (await other.ready())["ready"]:
            try:
                return replace(await other.begin(request, tell), application=canary.application)
            except (Overloaded, TargetUnavailable, OrchestratorLost):
                pass
        running = await own.begin(request, tell)
        return replace(running, application=self._own_name) if canary else running

    async def search(
        self, tenant: str, documents: Sequence[DocumentRef], query: str, num_results: int
    ) -> Sequence[RetrievedChunk]:
        """Return what the retriever of the first model finds."""
        return await self._own[0].search(tenant, documents, query, num_results)

    async def list_chunks(
        self, tenant: str, document: DocumentRef, first: int, count: int
    ) -> Sequence[Chunk]:
        """Return the passages of the first model's retriever."""
        return await self._own[0].list_chunks(tenant, document, first, count)

    async def embed(
        self, tenant: str, texts: Sequence[str], model: str | None, query: str | None = None
    ) -> TextVectors:
        """Return what the retriever of the first model makes of texts."""
        return await self._own[0].embed(tenant, texts, model, query)

    async def tokenize(self, request: GenerateRequest) -> TokenizedPrompt:
        """Return the tokens of a request's prompt for its model."""
        return await self._own[self._at[request.model]].tokenize(request)

    async def detokenize(self, request: GenerateRequest) -> str:
        """Return the text of token ids of a request's model."""
        return await self._own[self._at[request.model]].detokenize(request)

    async def ready(self) -> dict[str, Any]:
        """Return the state of this application, which answers whatever the other one cannot.

        Of several models `models` says which are ready; the application is when all of them are.
        """
        states = [await own.ready() for own in self._own]
        state = next((each for each in states if not each["ready"]), states[0])
        if len(states) == 1:
            return state
        ready = {name: bool(each["ready"]) for name, each in zip(self._models, states, strict=True)}
        return state | {"models": ready}


def position(request: GenerateRequest) -> float:
    """Return a number in [0, 1), the same for all requests that read the same long text."""
    name = affinity_of(request) or request.request_id
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) / 2**64
