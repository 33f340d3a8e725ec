"""The orchestrator deployment, which runs each request on target and drafter engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span
from ray.serve.handle import DeploymentHandle

from cluster.reports import LoopWatch
from deployments.config.live import accept_settings
from deployments.config.serve_config import ServeConfig
from deployments.logs import log_with_serve
from deployments.metrics import RequestMetrics
from deployments.orchestrator.pacing import pace
from deployments.orchestrator.ray_services import RayServices
from library.accounts.callers import TENANT
from library.library_access import LibraryAccess
from library.library_config import LibraryConfig
from rapid.answering.answers import gather_deltas
from rapid.answering.prompt.prompt_tokens import TokenizedPrompt
from rapid.answering.raw_prompts import answer_prompts
from rapid.answering.request import RequestRun
from rapid.chat_messages import DocumentRef, Message
from rapid.checkpoints.text import ChatText
from rapid.errors import BadRequest, Overloaded, RapidError
from rapid.events import Finished, GenerationEvent, Started
from rapid.messages import GenerateRequest, SpeculationRequest, new_call_id
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.relevance import TextVectors

Refusal = BadRequest | Overloaded
"""What is the last event of a request that is refused: Serve logs what is raised as an error."""


class Orchestrator:
    """A deployment that runs each request as a `RequestRun` over the pools' handles."""

    def __init__(
        self,
        config: ServeConfig,
        target: DeploymentHandle,
        drafter: DeploymentHandle | None,
        retriever: DeploymentHandle | None,
        library: LibraryConfig | None = None,
    ) -> None:
        """Load the tokenizers and build the services that all requests share.

        Args:
            config: The application's settings; the models stay, the rest changes with
                `reconfigure`.
            target: The handle of the target's pool.
            drafter: The handle of the pool that drafts; None if no model does.
            retriever: The handle of the retriever; None if no model drafts.
            library: Where the texts of stored files are; None where none are stored.
        """
        log_with_serve()
        pools = config.target, config.drafter_pool
        target_text, drafter_text = [ChatText.load(each.engine.model) for each in pools]
        self._access = access = LibraryAccess(library) if library else None
        self._shared = RayServices(target, drafter, retriever, target_text, drafter_text, access)
        self._services = self._shared.under(config)
        self._metrics = RequestMetrics(config.api.model)
        self._loop = LoopWatch()
        self._settings: ServeConfig | None = None

    def reconfigure(self, settings: dict[str, Any]) -> None:
        """Take new settings, which requests that run do not see; Serve calls this also at start.

        Who waits goes on waiting, and what was measured is kept. Settings that break their schema
        are refused.
        """
        self._settings = accept_settings(ServeConfig, settings, self._settings, of="Orchestrator")
        self._services = self._shared.under(self._settings)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent | Refusal]:
        """Yield the events of a request; closing or cancelling the stream releases everything.

        Rounds that end within a twentieth of a second share a delta.
        """
        async with aclosing(pace(self._events(request))) as events:
            async for event in _with_refusal(events):
                yield event

    async def answer(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent | Refusal]:
        """Yield the events of `generate` with the text in two pieces: the first, and the rest."""
        async with aclosing(self._events(request)) as events:
            async for event in _with_refusal(gather_deltas(events)):
                yield event

    async def _events(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of a request as they come, counted and noted in the call's span."""
        TENANT.set(request.tenant)
        events = self._metrics.watch(answer_prompts(self._services, request))
        async with self._hold(request.tenant, request.documents), aclosing(events):
            async for event in events:
                _note(trace.get_current_span(), event)  # of this call, which Serve records
                yield event

    async def search(
        self, tenant: str, documents: Sequence[DocumentRef], query: str, num_results: int
    ) -> Sequence[RetrievedChunk]:
        """Return the passages of documents that are nearest to a query, best first.

        Raises:
            RetrievalUnavailable: Nothing can be retrieved now, or no model of this server drafts.
        """
        TENANT.set(tenant)
        async with self._hold(tenant, documents):
            return await self._shared.search(tenant, documents, query, num_results)

    async def list_chunks(
        self, tenant: str, document: DocumentRef, first: int, count: int
    ) -> Sequence[Chunk]:
        """Return some passages of a document; errors are those of `search`."""
        TENANT.set(tenant)
        async with self._hold(tenant, [document]):
            return await self._shared.list_chunks(tenant, document, first, count)

    async def embed(
        self, tenant: str, texts: Sequence[str], model: str | None, query: str | None = None
    ) -> TextVectors | RapidError:
        """Return the vectors of texts, or how relevant they are to a query; or why not."""
        TENANT.set(tenant)
        try:
            return await self._shared.embed(tenant, texts, model, query)
        except RapidError as refusal:
            return refusal

    async def tokenize(self, request: GenerateRequest) -> TokenizedPrompt | RapidError:
        """Return the tokens of a request's prompt; or why it has none."""
        TENANT.set(request.tenant)
        services = self._services
        try:
            longest = services.pools.max_context["target"]
            return await services.prompts.tokenize(request, longest)
        except RapidError as refusal:
            return refusal

    async def detokenize(self, request: GenerateRequest) -> str | RapidError:
        """Return the text of a prompt of token ids; or why it has none."""
        TENANT.set(request.tenant)
        try:
            return await self._services.prompts.detokenize(request)
        except RapidError as refusal:
            return refusal

    async def prefill(self, tenant: str, document: DocumentRef) -> Refusal | None:
        """Have a target read a document as questions about it begin; return why that is refused.

        While requests wait for a target it is.
        """
        TENANT.set(tenant)
        request = GenerateRequest(
            f"prefill-{new_call_id()}",
            tenant,
            (Message("user", ""),),
            (document,),
            temperature=0,
            max_tokens=1,
            speculation=SpeculationRequest(mode="plain"),
        )
        try:
            self._shared.check_idle()
            events = RequestRun(self._services, request).events()
            async with self._hold(tenant, request.documents), aclosing(events):
                async for _ in events:
                    pass
        except (BadRequest, Overloaded) as refusal:
            return refusal
        return None

    def _hold(
        self, tenant: str, documents: Sequence[DocumentRef]
    ) -> AbstractAsyncContextManager[None]:
        """Return the context in which the texts of documents are kept here."""
        return nullcontext() if self._access is None else self._access.hold(tenant, documents)

    async def check_health(self) -> None:
        """Answer Serve, which replaces a replica whose event loop stands still.

        Serve asks for the first time when the replica has started: the pair is measured from then.
        """
        services = self._services
        services.gate.begin(services.prompts, services.pools)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how late the event loop is, for Serve's autoscaler."""
        return self._loop.autoscaling_stats()


async def _with_refusal(
    events: AsyncGenerator[GenerationEvent],
) -> AsyncGenerator[GenerationEvent | Refusal]:
    """Yield `events` and the refusal that ends them, if one does."""
    try:
        async for event in events:
            yield event
    except (BadRequest, Overloaded) as refusal:
        yield refusal


def _note(span: Span, event: GenerationEvent) -> None:
    """Add what a request has resolved to, and what it has cost, to its span."""
    if isinstance(event, Started):
        span.set_attributes({"rapid.mode": event.mode, "rapid.reason": event.reason})
    elif isinstance(event, Finished):
        receipt = event.receipt
        span.set_attributes(
            {
                "rapid.prompt_tokens": receipt.prompt_tokens,
                "rapid.completion_tokens": sum(c.completion_tokens for c in receipt.choices),
                "rapid.accepted_tokens": sum(c.accepted for c in receipt.choices),
                "rapid.failovers": len(receipt.failovers),
            }
        )
