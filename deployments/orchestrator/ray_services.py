"""What all requests of one orchestrator share, over the handles of an application."""

from __future__ import annotations

from collections.abc import Sequence

from ray.serve.handle import DeploymentHandle

from cluster.placement import num_queued
from deployments.config.pools.pool_settings import EnginePoolConfig, OrchestratorPoolConfig
from deployments.config.serve_config import ServeConfig
from deployments.orchestrator.lease_queue import LeaseQueue
from deployments.orchestrator.ray_pools import RayPool
from deployments.orchestrator.ray_retrieval import RayRetrieval
from deployments.orchestrator.ray_verifiers import VerifierSettings
from deployments.pools.passage_reports import keep_gate
from library.library_access import LibraryAccess
from rapid.answering.leases.pair_pools import Pools
from rapid.answering.leases.sources import Drafts
from rapid.answering.passage_gate import PassageGate
from rapid.answering.prompt.prompting import RequestPrompts
from rapid.answering.services import Services
from rapid.chat_messages import DocumentRef
from rapid.checkpoints.text import ChatText
from rapid.documents import InlineDocuments
from rapid.errors import (
    DrafterUnavailable,
    Overloaded,
    RetrievalPending,
    RetrievalUnavailable,
    TargetUnavailable,
)
from rapid.estimators import Patience
from rapid.ports import DocumentResolver
from rapid.speculation.pace.round_costs import RoundCosts
from rapid.vllm_config import VllmConfig
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.embeddings.relevance import TextVectors
from retrieval.settings import RetrievalConfig


class RayServices:
    """A maker of `Services` from settings, which keeps what a change of settings must not lose.

    A change of settings finds requests that wait for leases and for threads, and times that were
    measured: how long rounds take, what drafting costs, how fast leases become free. All of that
    passes on to the requests that come later.
    """

    def __init__(
        self,
        target: DeploymentHandle,
        drafter: DeploymentHandle | None,
        retriever: DeploymentHandle | None,
        target_text: ChatText,
        drafter_text: ChatText,
        library: LibraryAccess | None = None,
    ) -> None:
        """Store the handles and texts, which stay while settings change.

        Args:
            target: The handle of the target's pool.
            drafter: The handle of the pool that drafts; None if no model does.
            retriever: The handle of the retriever; None if no model drafts.
            target_text: The target's tokenizer and chat template.
            drafter_text: The drafter's.
            library: Where the texts of stored files are; None where none are stored.
        """
        self._target, self._drafter, self._retriever = target, drafter, retriever
        self._texts = target_text, drafter_text
        self._resolver: DocumentResolver = library or InlineDocuments()
        self._retrieval: RayRetrieval | None = None
        self._chunking = RetrievalConfig()
        self._queues: dict[str, LeaseQueue] = {}
        self._patience: Patience | None = None
        self._prompts: RequestPrompts | None = None
        self._costs = RoundCosts()
        self._gate: PassageGate | None = None

    def under(self, config: ServeConfig) -> Services:
        """Return the services of requests that come from now on, under these settings."""
        settings = config.orchestrator
        patience = self._patient(settings)
        if self._gate is None:  # the engines' settings stay
            has_drafter = config.own_drafting is None
            tokens = config.drafter_pool.engine.passage_cache_tokens
            self._gate = PassageGate(is_wanted=has_drafter and tokens > 0)
            keep_gate(self._gate)
        return Services(
            config=settings,
            speculation=config.speculation,
            pools=self._pools(config, patience),
            prompts=self._prompting(config),
            patience=patience,
            costs=self._costs,
            gate=self._gate,
        )

    def _patient(self, settings: OrchestratorPoolConfig) -> Patience:
        limits = settings.drafter_hangs_s, settings.target_hangs_s
        if self._patience is None:
            self._patience = Patience(*limits)
        self._patience.allow(*limits)
        return self._patience

    def _pools(self, config: ServeConfig, patience: Patience) -> Pools:
        eos_ids = self._texts[0].eos_ids
        verifiers = VerifierSettings(patience, config.orchestrator.acceptance_site, eos_ids)
        target, drafter = config.target.engine, config.drafter_pool.engine
        queue, ttl_s = self._queue("target", config.target), target.lease_ttl_s
        targets = alone = RayPool(self._target, queue, ttl_s, verifiers, TargetUnavailable)
        drafters: Drafts = config.own_drafting or targets
        if self._drafter is not None and config.drafter != "target":
            queue, ttl_s = self._queue("drafter", config.drafter_pool), drafter.lease_ttl_s
            alone = RayPool(self._drafter, queue, ttl_s, verifiers, TargetUnavailable)
            may_rest = config.drafter_pool.pool.min_replicas == 0
            drafters = RayPool(
                self._drafter, queue, ttl_s, verifiers, DrafterUnavailable, may_rest=may_rest
            )
        return Pools(
            target=targets,
            drafter=drafters,
            alone=alone,
            max_context={
                "target": target.max_context or target.kv_cache_tokens,
                "drafter": drafter.max_context or drafter.kv_cache_tokens,
            },
            vllm_drafts=isinstance(drafter, VllmConfig),
        )

    def _queue(self, name: str, pool: EnginePoolConfig) -> LeaseQueue:
        """Return the line for a pool's leases, with as many places as the settings give it."""
        max_waiting = num_queued(pool.pool, pool.engine.max_leases)
        queue = self._queues.setdefault(name, LeaseQueue(max_waiting))
        queue.admit(max_waiting)
        return queue

    def _prompting(self, config: ServeConfig) -> RequestPrompts:
        retrieval, found = config.retriever.retrieval, None
        if self._retriever is not None:
            wait_s = config.orchestrator.retrieval_wait_s
            found = RayRetrieval(self._retriever, wait_s, self._resolver)
        self._retrieval, self._chunking = found, retrieval
        budget_tokens, budget_for = retrieval.budget_tokens, retrieval.budget_for
        if self._prompts is None:
            self._prompts = RequestPrompts(
                *self._texts,
                found,
                budget_tokens=budget_tokens,
                budget_for=budget_for,
                resolver=self._resolver,
            )
        return self._prompts.with_retrieval(
            found, budget_tokens=budget_tokens, budget_for=budget_for
        )

    def check_idle(self) -> None:
        """Raise Overloaded if requests wait for a lease of the target."""
        queue = self._queues.get("target")
        if queue is not None and queue.num_waiting:
            raise Overloaded("Requests wait for the target.")

    async def search(
        self, tenant: str, documents: Sequence[DocumentRef], query: str, num_results: int
    ) -> Sequence[RetrievedChunk]:
        """Return the passages of documents that are nearest to a query, best first.

        Raises:
            RetrievalUnavailable: Nothing can be retrieved now, or no model of this server drafts.
        """
        if self._retrieval is None:
            raise RetrievalUnavailable("Nothing is searched here: no model of this server drafts.")
        if not documents:
            return []
        own = self._chunking.chunk_tokens
        longest = max(each.chunk_sizes.tokens if each.chunk_sizes else own for each in documents)
        try:
            found = await self._retrieval.retrieve(tenant, documents, query, num_results * longest)
        except (DrafterUnavailable, RetrievalPending) as error:
            raise RetrievalUnavailable(f"Nothing is retrieved now: {error}") from None
        return sorted(found.chunks, key=lambda each: -each.score)[:num_results]

    async def embed(
        self, tenant: str, texts: Sequence[str], model: str | None, query: str | None = None
    ) -> TextVectors:
        """Return the vectors of texts, or how relevant they are to a query.

        Raises:
            BadRequest: The embedder has another name, or no dense vectors.
            RetrievalUnavailable: No model of this server drafts, or nothing is embedded now.
        """
        if self._retrieval is None:
            raise RetrievalUnavailable("Nothing is embedded here: no model of this server drafts.")
        return await self._retrieval.embed(tenant, texts, model, query)

    async def list_chunks(
        self, tenant: str, document: DocumentRef, first: int, count: int
    ) -> Sequence[Chunk]:
        """Return some passages of a document, from the first one's number on, in order.

        Raises:
            RetrievalUnavailable: Nothing can be retrieved now, or no model of this server drafts.
        """
        if self._retrieval is None:
            raise RetrievalUnavailable("Nothing is searched here: no model of this server drafts.")
        return await self._retrieval.list_chunks(tenant, document, first, count)
