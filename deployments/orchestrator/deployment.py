"""The orchestrator: runs the loop of every request between drafter and target engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.config.serve_config import ServeConfig
from deployments.metrics import RequestMetrics
from deployments.orchestrator.leasing import Role
from deployments.orchestrator.ray_ports import Patience
from deployments.orchestrator.readiness import readiness
from rapid.answering.prompting import Prompter
from rapid.answering.request import Generation, Services
from rapid.checkpoints.text import ChatText
from rapid.messages import GenerateRequest, GenerationEvent


class Orchestrator:
    """Holds the tokenizers and the pools' handles; one `Generation` per request."""

    def __init__(
        self,
        config: ServeConfig,
        target: DeploymentHandle,
        drafter: DeploymentHandle | None,
        retriever: DeploymentHandle | None,
    ) -> None:
        """With prompt lookup there is neither drafter nor retriever."""
        prompter = Prompter(
            ChatText.load(config.target.engine.model),
            ChatText.load(config.drafter_pool.engine.model),
            retriever,
            config.retriever.retrieval,
            config.orchestrator.retrieval_wait_s,
        )
        handles: dict[Role, DeploymentHandle] = {"target": target}
        if drafter is not None:
            handles["drafter"] = drafter
        patience = Patience(config.orchestrator.drafter_hangs_s)
        self._services = Services(config, handles, prompter, patience)
        self._metrics = RequestMetrics(config.api.model)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationEvent]:
        """The events of `rapid.messages`; closing or cancelling the stream releases everything."""
        generation = Generation(self._services, request)
        async with aclosing(self._metrics.watched(generation.events())) as events:
            async for event in events:
                yield event

    async def ready(self) -> dict[str, Any]:
        """Pools with their replicas and engines with their ledgers, for ``GET /ready``."""
        pools = self._services.config.pools
        may_rest = {name for name, pool in pools.items() if pool.min_replicas == 0}
        return await readiness(serve.get_replica_context().app_name, may_rest)
