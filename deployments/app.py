"""The application graph and its builder.

::

    client ── Ingress ── Orchestrator ──lease── Target     (engine: child actor)
              HTTP       one loop per  ──lease── Drafter    (engine: child actor)
                         request       ───────── Retriever  (chunks, embeddings, Qdrant)

Each box is a deployment with its own pool; plain classes become deployments only in this module.
With ``drafter: target`` there is no Drafter and the target's engines draft for themselves; with
``drafter: prompt_lookup`` there is no Retriever either, and the orchestrator drafts.

This module has no ``from __future__ import annotations``: Serve turns ``args`` into `ServeConfig`
only when the builder's annotation is the class itself, and passes a bare dict when it is a string.
"""

from typing import Any

from ray import serve
from ray.serve import Application

from cluster.serve_internals import pin_version
from deployments.api.ingress_replica import IngressReplica
from deployments.api.proxy.server_limits import check_callers_are_known, router_options
from deployments.config.plans import Plans, deployment_plans
from deployments.config.preflight import preflight
from deployments.config.serve_config import EnginePoolConfig, ServeConfig
from deployments.config.serve_file import check
from deployments.orchestrator.deployment import Orchestrator
from deployments.pools.engine_actor import EngineFactory, load_engine
from deployments.pools.leasing_replica import EngineReplica
from deployments.pools.retriever_replica import RetrieverReplica

__all__ = ["build", "check", "compose"]


def build(args: ServeConfig) -> Application:
    """Build the application; ``import_path: deployments.app:build`` names this function."""
    check_callers_are_known(has_keys=args.api.has_keys)
    return compose(preflight(args))


def compose(
    config: ServeConfig,
    load_target: EngineFactory = load_engine,
    load_drafter: EngineFactory = load_engine,
) -> Application:
    """Compose the module's graph; `load_target` and `load_drafter` make the engines."""
    plans = deployment_plans(config)
    # The metrics of engines that run keep the name with which they were started.
    model_name = config.api.model
    target = _engines("Target", plans, config.target, load_target, model_name)
    drafter = retriever = None
    if config.drafter == "target":
        drafter = target
    elif config.drafts_with_model:
        drafter = _engines("Drafter", plans, config.drafter_pool, load_drafter, model_name)
    if drafter is not None:
        retriever = _deployment("Retriever", plans, RetrieverReplica).bind(
            config.retriever.placed, config.target.engine.model, model_name
        )
    orchestrator = _deployment("Orchestrator", plans, Orchestrator).bind(
        config, target, drafter, retriever
    )
    replica = serve.ingress()(IngressReplica)
    ingress = _deployment("Ingress", plans, replica, **router_options())
    return ingress.bind(config.filled_api, orchestrator, config.is_embedded)


def _engines(
    name: str, plans: Plans, pool: EnginePoolConfig, load: EngineFactory, model_name: str
) -> Application:
    """Return a pool of leasing replicas."""
    return _deployment(name, plans, EngineReplica).bind(pool.engine, pool.pool, load, model_name)


def _deployment(name: str, plans: Plans, cls: type, **more: Any) -> serve.Deployment:
    plan = plans[name]
    deployment = serve.deployment(cls).options(name=name, **plan.options, **more)
    return pin_version(deployment, plan.version)
