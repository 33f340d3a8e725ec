"""Readiness of an application: the replicas of every pool and the status of every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus, ReplicaState

from deployments.pools.engine_actor import engines_of
from rapid.messages import EngineStatus

_TIMEOUT_S = 5.0


async def readiness(app: str, may_rest: Container[str] = ()) -> dict[str, Any]:
    """Return the state of an application's pools and engines.

    Engines that do not answer within 5 seconds are listed as unavailable.

    Args:
        app: The application's name.
        may_rest: Pools that may have no replica while they are idle.
    """
    status, actors, metrics = await asyncio.gather(
        asyncio.to_thread(serve.status),
        asyncio.to_thread(engines_of, app),
        asyncio.to_thread(metrics_urls),
    )
    application = status.applications[app]
    pools = {
        name.lower(): {
            "replicas": deployment.replica_states.get(ReplicaState.RUNNING, 0),
            "starting": deployment.replica_states.get(ReplicaState.STARTING, 0),
            "stopping": deployment.replica_states.get(ReplicaState.STOPPING, 0),
            "status": deployment.status.value,
        }
        for name, deployment in application.deployments.items()
    }
    engines = await asyncio.gather(*(_ledger(name, actor) for name, actor in actors.items()))
    is_ready = application.status == ApplicationStatus.RUNNING and all(
        pool["replicas"] or name in may_rest for name, pool in pools.items()
    )
    return {
        "ready": is_ready,
        "pools": pools,
        "engines": sorted(engines, key=lambda e: e["name"]),
        "metrics": metrics,
    }


def metrics_urls() -> list[str]:
    """Return the metrics URL of the Ray agent on every live node; blocks while it asks Ray."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]


async def _ledger(name: str, actor: Any) -> dict[str, Any]:
    _, pool, replica = name.rsplit("/", 2)
    entry: dict[str, Any] = {"name": f"{pool.lower()}/{replica}", "pool": pool.lower()}
    try:
        status: EngineStatus = await asyncio.wait_for(actor.status.remote(), _TIMEOUT_S)
    except (RayError, TimeoutError):  # loading or stopping
        return entry | {"status": "unavailable"}
    return entry | {
        "status": "ok",
        "leases_open": status.leases_open,
        "max_leases": status.max_leases,
        "kv_pages_in_use": status.kv_pages_in_use,
        "kv_pages_total": status.kv_pages_total,
        "page_tokens": status.page_tokens,
        "max_context": status.max_context,
    }
