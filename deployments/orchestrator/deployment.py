"""The orchestrator deployment, which runs each request on target and drafter engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.placement import num_queued
from deployments.config.serve_config import ServeConfig
from deployments.metrics import RequestMetrics
from deployments.orchestrator.lease_queue import LeaseQueue
from deployments.orchestrator.ray_ports import RayPool, RayRetrieval, VerifierSettings
from deployments.orchestrator.readiness import readiness
from rapid.answering.prompting import RequestPrompts
from rapid.answering.request import RequestRun
from rapid.answering.services import Pools, Services
from rapid.checkpoints.text import ChatText
from rapid.errors import DrafterUnavailable, TargetUnavailable
from rapid.estimators import Patience
from rapid.messages import GenerateRequest, GenerationEvent


class Orchestrator:
    """A deployment that runs each request as a `RequestRun` over the pools' handles."""

    def __init__(
        self,
        config: ServeConfig,
        target: DeploymentHandle,
        drafter: DeploymentHandle | None,
        retriever: DeploymentHandle | None,
    ) -> None:
        """Load the tokenizers and build the services that all requests share.

        Args:
            config: The application's settings.
            target: The handle of the target's pool.
            drafter: The handle of the pool that drafts; None with prompt lookup.
            retriever: The handle of the retriever; None with prompt lookup.
        """
        target_text = ChatText.load(config.target.engine.model)
        drafter_text = ChatText.load(config.drafter_pool.engine.model)
        self._pools = config.pools
        self._services = services_over_ray(
            config, target, drafter, retriever, target_text, drafter_text
        )
        self._metrics = RequestMetrics(config.api.model)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        """Yield the events of a request; closing or cancelling the stream releases everything."""
        run = RequestRun(self._services, request)
        async with aclosing(self._metrics.watched(run.events())) as events:
            async for event in events:
                yield event

    async def ready(self) -> dict[str, Any]:
        """Return the status of the pools' replicas and engines, for ``GET /ready``."""
        may_rest = {name for name, pool in self._pools.items() if pool.min_replicas == 0}
        return await readiness(serve.get_replica_context().app_name, may_rest)


def services_over_ray(
    config: ServeConfig,
    target: DeploymentHandle,
    drafter: DeploymentHandle | None,
    retriever: DeploymentHandle | None,
    target_text: ChatText,
    drafter_text: ChatText,
) -> Services:
    """Return the services that all requests share, over a deployed application's handles."""
    settings = config.orchestrator
    retrieval = config.retriever.retrieval
    patience = Patience(settings.drafter_hangs_s)
    verifiers = VerifierSettings(patience, settings.acceptance_site, target_text.eos_ids)
    target_engine, drafter_engine = config.target.engine, config.drafter_pool.engine
    waiting = LeaseQueue(num_queued(config.target.pool, target_engine.max_leases))
    targets = RayPool(target, waiting, target_engine.lease_ttl_s, verifiers, TargetUnavailable)
    drafters = alone = None
    if drafter is not None:
        ttl_s = drafter_engine.lease_ttl_s
        if config.drafter != "target":
            waiting = LeaseQueue(num_queued(config.drafter_pool.pool, drafter_engine.max_leases))
        alone = RayPool(drafter, waiting, ttl_s, verifiers, TargetUnavailable)
        drafters = RayPool(drafter, waiting, ttl_s, verifiers, DrafterUnavailable)
    if config.drafter == "target":
        drafters = targets
    return Services(
        config=settings,
        speculation=config.speculation,
        pools=Pools(
            target=targets,
            drafter=drafters,
            alone=alone,
            max_context={
                "target": target_engine.max_context or target_engine.kv_cache_tokens,
                "drafter": drafter_engine.max_context or drafter_engine.kv_cache_tokens,
            },
        ),
        prompts=RequestPrompts(
            target_text,
            drafter_text,
            RayRetrieval(retriever, settings.retrieval_wait_s) if retriever else None,
            budget_tokens=retrieval.budget_tokens,
            budget_for=retrieval.budget_for,
        ),
        patience=patience,
    )
