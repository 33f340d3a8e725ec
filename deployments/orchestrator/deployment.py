"""The orchestrator deployment, which runs each request on target and drafter engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import Span
from ray.serve.handle import DeploymentHandle

from cluster.placement import num_queued
from cluster.reports import LoopWatch
from deployments.config.live import accepted
from deployments.config.serve_config import ServeConfig
from deployments.logs import log_with_serve
from deployments.metrics import RequestMetrics
from deployments.orchestrator.lease_queue import LeaseQueue
from deployments.orchestrator.ray_ports import RayPool, VerifierSettings
from deployments.orchestrator.ray_retrieval import RayRetrieval
from rapid.answering.answers import gathered
from rapid.answering.prompting import RequestPrompts
from rapid.answering.request import RequestRun
from rapid.answering.services import Pools, Services
from rapid.checkpoints.text import ChatText
from rapid.errors import DrafterUnavailable, TargetUnavailable
from rapid.estimators import Patience
from rapid.messages import Finished, GenerateRequest, GenerationEvent, Started


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
            config: The application's settings; the models stay, the rest changes with
                `reconfigure`.
            target: The handle of the target's pool.
            drafter: The handle of the pool that drafts; None with prompt lookup.
            retriever: The handle of the retriever; None with prompt lookup.
        """
        log_with_serve()
        self._handles = (target, drafter, retriever)
        self._texts = (
            ChatText.load(config.target.engine.model),
            ChatText.load(config.drafter_pool.engine.model),
        )
        self._services = services_over_ray(config, *self._handles, *self._texts)
        self._metrics = RequestMetrics(config.api.model)
        self._loop = LoopWatch()
        self._settings: ServeConfig | None = None

    def reconfigure(self, settings: dict[str, Any]) -> None:
        """Take new settings, which requests that run do not see; Serve calls this also at start.

        What was measured of rounds is kept. Settings that break their schema are refused.
        """
        config = accepted(ServeConfig, settings, self._settings, of="Orchestrator")
        services = services_over_ray(config, *self._handles, *self._texts)
        self._services = replace(services, costs=self._services.costs)
        self._settings = config

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of a request; closing or cancelling the stream releases everything."""
        run = RequestRun(self._services, request)
        async with aclosing(self._metrics.watched(run.events())) as events:
            async for event in events:
                _note(trace.get_current_span(), event)  # of this call, which Serve records
                yield event

    async def answer(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        """Yield the events of `generate` with the text of a choice in one piece, at the end."""
        async with aclosing(self.generate(request)) as events:
            async for event in gathered(events):
                yield event

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return how late the event loop is, for Serve's autoscaler."""
        return self._loop.autoscaling_stats()


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
    patience = Patience(settings.drafter_hangs_s, settings.target_hangs_s)
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
        may_rest = config.drafter_pool.pool.min_replicas == 0
        drafters = RayPool(
            drafter, waiting, ttl_s, verifiers, DrafterUnavailable, may_rest=may_rest
        )
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
