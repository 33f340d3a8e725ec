"""The application graph and its builder.

::

    client ── Ingress ── Orchestrator ──lease── Target     (engine: child actor)
              HTTP       one loop per  ──lease── Drafter    (engine: child actor)
                         request       ───────── Retriever  (chunks, embeddings, Qdrant)

Each box is a deployment with its own pool; plain classes become deployments only in this module.
With ``drafter: target`` there is no Drafter and the target's engines draft for themselves; with
``drafter: prompt_lookup`` there is no Retriever either, and the orchestrator drafts.

Of several models each has an Orchestrator of its own; what they share is one deployment. Metrics
name the model of a deployment, and the pool instead where models share its engines.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from cluster.serve_internals import pin_version
from deployments.api.ingress_replica import IngressReplica
from deployments.api.proxy.server_limits import check_callers_are_known, router_options
from deployments.config.named_models import read_application
from deployments.config.plans import Plans, deployment_plans
from deployments.config.preflight import preflight
from deployments.config.serve_config import ApplicationConfig
from deployments.config.serve_file import check
from deployments.orchestrator.deployment import Orchestrator
from deployments.pools.engine_actor import EngineFactory, load_engine
from deployments.pools.leasing_replica import EngineReplica
from deployments.pools.retriever_replica import RetrieverReplica

__all__ = ["build", "check", "compose"]


def build(args: dict[str, Any]) -> Application:
    """Build the application; ``import_path: deployments.app:build`` names this function."""
    config = read_application(args)
    check_callers_are_known(has_keys=config.api.has_keys)
    return compose(preflight(config))


def compose(
    config: ApplicationConfig,
    load_target: EngineFactory = load_engine,
    load_drafter: EngineFactory = load_engine,
) -> Application:
    """Compose the module's graph; `load_target` and `load_drafter` make the engines."""
    plans = deployment_plans(config)
    nodes: dict[str, Application] = {}
    for model in config.served:
        # The metrics of engines that run keep the name with which they were started.
        for part, load in ((model.target, load_target), (model.drafter, load_drafter)):
            if part is not None and part.name not in nodes:
                engine, pool = part.settings.engine, part.settings.pool
                shared = part.section[1] if part.section[0] == "engine_pools" else None
                nodes[part.name] = _deployment(part.name, plans, EngineReplica).bind(
                    engine, pool, load, shared or model.name
                )
        if (retriever := model.retriever) is not None and retriever.name not in nodes:
            nodes[retriever.name] = _deployment(retriever.name, plans, RetrieverReplica).bind(
                retriever.settings.placed, model.target.settings.engine.model, model.name
            )
        nodes[model.orchestrator.name] = _deployment(
            model.orchestrator.name, plans, Orchestrator
        ).bind(
            model.config,
            *(part and nodes[part.name] for part in (model.target, model.drafter, model.retriever)),
        )
    replica = serve.ingress()(IngressReplica)
    ingress = _deployment("Ingress", plans, replica, **router_options())
    orchestrators = [nodes[model.orchestrator.name] for model in config.served]
    return ingress.bind(config.filled_api, *orchestrators)


def _deployment(name: str, plans: Plans, cls: type, **more: Any) -> serve.Deployment:
    plan = plans[name]
    deployment = serve.deployment(cls).options(name=name, **plan.options, **more)
    return pin_version(deployment, plan.version)
