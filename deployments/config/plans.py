"""What the settings make of each deployment, and so what an edit of them does to it.

Settings reach a replica in three ways. What it is started with is in its deployment's version: an
edit replaces the replicas. What its requests are answered with is its ``user_config``: an edit
reaches the replicas that run, in `reconfigure`. How many replicas there are, and how they are
scaled and stopped, are options that Serve's controller follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from cluster.placement import PoolConfig, deployment_options, engine_options
from cluster.versions import version_of
from deployments.config.pools.pool_settings import EnginePoolConfig
from deployments.config.serve_config import ApplicationConfig

Effect = Literal["starts", "ends", "rolls", "live"]


@dataclass(frozen=True)
class DeploymentPlan:
    """How Serve runs one deployment.

    Attributes:
        options: Arguments of ``Deployment.options``.
        version: What its replicas are started with, as `version_of` names it.
    """

    options: dict[str, Any]
    version: str

    @property
    def restarts_on(self) -> tuple[object, ...]:
        """What an edit must leave as it is to keep the replicas: version and resources."""
        resources = {
            name: value
            for name, value in self.options.items()
            if name == "ray_actor_options" or name.startswith("placement_group")
        }
        return self.version, resources


Plans = dict[str, DeploymentPlan]


def deployment_plans(config: ApplicationConfig) -> Plans:
    """Return the plan of every deployment of the application, by its name."""
    plans = {part.name: _engines(part.settings) for part in config.engine_parts.values()}
    kept = [config.library.kept.model_dump(mode="json")] if config.library else []
    for model in config.served:
        target, drafter = model.target.settings.engine, model.config.drafter_pool.engine
        if (retriever := model.retriever) is not None and retriever.name not in plans:
            # Each call says how much to retrieve.
            retrieval = retriever.settings.placed.model_copy(update={"budget_tokens": None})
            plans[retriever.name] = _plan(
                retriever.settings.pool, retrieval, target.model, has_affinity=True
            )
        plans[model.orchestrator.name] = _plan(
            model.orchestrator.settings.pool,
            target.model,
            drafter.model,
            model.drafter.name if model.drafter else model.config.drafter,
            model.name,
            *kept,
            has_affinity=True,
            is_scaled_by_lag=True,
            user_config=model.config.model_dump(
                mode="json",
                exclude_unset=True,
                exclude={
                    "api": True,
                    "library": True,
                    "retriever": {"retrieval": {"store": {"api_key"}}},
                },
            ),
        )
    if config.library is not None:
        retrievers = sorted({each.retriever.name for each in config.served if each.retriever})
        plans["Librarian"] = _plan(config.library.pool, *kept, retrievers)
    plans["Ingress"] = _plan(
        config.api.pool,
        [(model.orchestrator.name, model.target.name) for model in config.served],
        *kept,
        user_config=config.filled_api.model_dump(mode="json", exclude_unset=True),
    )
    return plans


def effects(before: Plans, after: Plans) -> dict[str, Effect]:
    """Return what going from some plans to others does to each deployment that it changes.

    ``rolls`` replaces all replicas, new ones first where there is room (`max_surge_percent`);
    ``live`` replaces none.
    """
    found: dict[str, Effect] = {}
    for name in before | after:
        if name not in before or name not in after:
            found[name] = "starts" if name in after else "ends"
        elif before[name].restarts_on != after[name].restarts_on:
            found[name] = "rolls"
        elif before[name] != after[name]:
            found[name] = "live"
    return found


def _engines(pool: EnginePoolConfig) -> DeploymentPlan:
    """Return the plan of replicas with an engine, each with as many leases as its engine."""
    engine = pool.engine
    return _plan(pool.pool, engine, engine_options(pool.pool, "any"), max_leases=engine.max_leases)


def _plan(
    pool: PoolConfig,
    *started_with: object,
    max_leases: int | None = None,
    has_affinity: bool = False,
    is_scaled_by_lag: bool = False,
    user_config: dict[str, Any] | None = None,
) -> DeploymentPlan:
    options = deployment_options(
        pool, max_leases, has_affinity=has_affinity, is_scaled_by_lag=is_scaled_by_lag
    )
    if user_config is not None:
        options["user_config"] = user_config
    # Serve's own version of a deployment leaves the labels of a placement group out.
    return DeploymentPlan(options, version_of((*started_with, pool.node_labels)))
