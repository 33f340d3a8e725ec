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

from ray import serve
from ray.serve import Application

from cluster.placement import PoolConfig, deployment_options
from deployments.api.replica import IngressReplica
from deployments.config.preflight import preflight
from deployments.config.serve_config import EnginePoolConfig, ServeConfig
from deployments.config.serve_file import check
from deployments.orchestrator.deployment import Orchestrator
from deployments.pools.engine_actor import EngineFactory, load_engine
from deployments.pools.replica import EngineReplica
from deployments.pools.retriever import RetrieverReplica

__all__ = ["build", "check", "compose"]


def build(args: ServeConfig) -> Application:
    """Build the application; ``import_path: deployments.app:build`` names this function."""
    return compose(preflight(args))


def compose(
    config: ServeConfig,
    load_target: EngineFactory = load_engine,
    load_drafter: EngineFactory = load_engine,
) -> Application:
    """Compose the module's graph; `load_target` and `load_drafter` make the engines."""
    model_name = config.api.model
    target = _engines("Target", config.target, load_target, model_name)
    drafter = retriever = None
    if config.drafter == "target":
        drafter = target
    elif config.drafts_with_model:
        drafter = _engines("Drafter", config.drafter_pool, load_drafter, model_name)
    if drafter is not None:
        retriever = _deployment("Retriever", RetrieverReplica, config.retriever.pool).bind(
            config.retriever.retrieval, config.target.engine.model
        )
    orchestrator = _deployment("Orchestrator", Orchestrator, config.orchestrator.pool).bind(
        config, target, drafter, retriever
    )
    ingress = _deployment("Ingress", serve.ingress()(IngressReplica), config.api.pool)
    return ingress.bind(config.api, orchestrator, config.is_embedded)


def _engines(
    name: str, pool: EnginePoolConfig, load: EngineFactory, model_name: str
) -> Application:
    """Return a pool of leasing replicas, each with as many leases as its engine."""
    deployment = _deployment(name, EngineReplica, pool.pool, pool.engine.max_leases)
    return deployment.bind(pool.engine, pool.pool, load, model_name)


def _deployment(
    name: str, cls: type, pool: PoolConfig, max_leases: int | None = None
) -> serve.Deployment:
    return serve.deployment(cls).options(name=name, **deployment_options(pool, max_leases))
