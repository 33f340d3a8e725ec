"""The application graph and its builder.

::

    client ── Ingress ── Orchestrator ──lease── Target     (engine: child actor)
              HTTP       one loop per  ──lease── Drafter    (engine: child actor)
                         request       ───────── Retriever  (chunks, embeddings, Qdrant)
              files      ───── Librarian ───────┘           (reads files, database, blobs)

Each box is a deployment with its own pool; plain classes become deployments only in this module.
With ``drafter: target`` there is no Drafter and the target's engines draft for themselves; where no
model drafts, as with ``drafter: prompt_lookup``, there is no Retriever either.

Of several models each has an Orchestrator of its own; what they share is one deployment. Metrics
name the model of a deployment, and the pool instead where models share its engines.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from cluster.serve_internals import pin_version
from deployments.config.named_models import read_application
from deployments.config.plans import Plans, deployment_plans
from deployments.config.pools.pool_settings import EnginePoolConfig
from deployments.config.preflight import preflight
from deployments.config.serve_config import AnySettings, ApplicationConfig, AppPart
from deployments.config.serve_file import check
from deployments.ingress_replica import IngressReplica
from deployments.orchestrator.deployment import Orchestrator
from deployments.pools.engine_actor import EngineFactory, load_engine
from deployments.pools.leasing_replica import EngineReplica
from deployments.pools.librarian_replica import LibrarianReplica
from deployments.pools.retriever_replica import RetrieverReplica
from deployments.proxy.server_limits import check_callers_are_known, router_options

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
    plans, bound = deployment_plans(config), dict[str, Application]()
    only = config.served[0].name if len(config.served) == 1 else ""

    def bind(part: AppPart[AnySettings], replica: type, *arguments: Any) -> Application:
        """Return a part that is started with `arguments` and a label of its metrics, once."""
        if part.name not in bound:
            # The metrics of replicas that run keep the name with which they were started.
            label = part.section[1] if len(part.section) > 1 else only
            deployment = _deployment(part.name, plans, replica)
            bound[part.name] = deployment.bind(*arguments, label)
        return bound[part.name]

    def engines(part: AppPart[EnginePoolConfig] | None, load: EngineFactory) -> Application | None:
        return part and bind(part, EngineReplica, part.settings.engine, part.settings.pool, load)

    kept = config.library and config.library.kept
    orchestrators, retrievers = [], dict[str, Application]()
    for model in config.served:
        target, drafter = engines(model.target, load_target), engines(model.drafter, load_drafter)
        retriever = model.retriever and bind(
            model.retriever,
            RetrieverReplica,
            model.retriever.settings.placed,
            model.target.settings.engine.model,
        )
        if retriever is not None and model.retriever is not None:
            retrievers[model.retriever.name] = retriever
        orchestrator = _deployment(model.orchestrator.name, plans, Orchestrator)
        orchestrators.append(orchestrator.bind(model.config, target, drafter, retriever, kept))
    librarian = None
    if kept is not None:
        librarian = _deployment("Librarian", plans, LibrarianReplica)
        librarian = librarian.bind(kept, len(retrievers), *retrievers.values(), *orchestrators)
    replica = serve.ingress()(IngressReplica)
    ingress = _deployment("Ingress", plans, replica, **router_options())
    return ingress.bind(config.filled_api, kept, librarian, *orchestrators)


def _deployment(name: str, plans: Plans, cls: type, **more: Any) -> serve.Deployment:
    plan = plans[name]
    deployment = serve.deployment(cls).options(name=name, **plan.options, **more)
    return pin_version(deployment, plan.version)
