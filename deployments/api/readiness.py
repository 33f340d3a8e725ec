"""Readiness of an application, as a snapshot that threads of an ingress replica keep fresh."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.schema import DeploymentStatus, ReplicaState

from deployments.pools.engine_actor import engines_of
from rapid.messages import EngineStatus
from rapid.ports import Clock

_log = logging.getLogger(__name__)

_EVERY_S = 1.0
_TIMEOUT_S = 5.0
_STALE_S = 30.0
_RESTING = (DeploymentStatus.HEALTHY.value, DeploymentStatus.UPSCALING.value)
_NEEDED = ("target", "orchestrator")  # and an ingress, which is where the snapshot is

Pools = dict[str, dict[str, Any]]
Engines = list[dict[str, Any]]


class Readiness:
    """Whether a request to an application would be answered, and the state of its parts.

    `state` answers from memory. Two threads look once a second: one asks Serve's controller for the
    replicas of every pool, the other the engines for their status. Neither uses the event loop that
    serves the API, a slot of a replica or the orchestrator, so that a saturated application still
    says that it is ready. What a thread saw counts for thirty seconds: the controller may be away
    for a while, without which requests are answered all the same.
    """

    def __init__(
        self,
        app: str,
        *,
        look_at_pools: Callable[[str], tuple[Pools, list[str]]] | None = None,
        look_at_engines: Callable[[str], Engines] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make the threads, which do not run before `start`.

        Args:
            app: The application's name.
            look_at_pools: Function from the name to the pools and the addresses of metrics.
            look_at_engines: Function from the name to the status of every engine.
            clock: Monotonic seconds.
        """
        self._app = app
        self._look_at_pools = look_at_pools or pools_of
        self._look_at_engines = look_at_engines or statuses_of
        self._clock = clock
        self._seen_at: float | None = None
        self._pools: Pools = {}
        self._metrics: list[str] = []
        self._engines: Engines = []

    def start(self) -> None:
        """Start the threads, which end with the process."""
        for look in (self.refresh_pools, self.refresh_engines):
            threading.Thread(target=_repeat, args=(look,), name="rapid-ready", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """Return the state; ``ready`` says whether a request would be answered."""
        is_fresh = self._seen_at is not None and self._clock() - self._seen_at <= _STALE_S
        return {
            "ready": is_fresh and would_answer(self._pools),
            "pools": self._pools,
            "engines": self._engines,
            "metrics": self._metrics,
        }

    def refresh_pools(self) -> None:
        """Look at the pools."""
        self._pools, self._metrics = self._look_at_pools(self._app)
        self._seen_at = self._clock()

    def refresh_engines(self) -> None:
        """Look at the engines."""
        self._engines = self._look_at_engines(self._app)


def would_answer(pools: Pools) -> bool:
    """Return whether a request would be answered: every pool that it needs has a replica, or rests.

    Serve's own word on the application does not count: it says UNHEALTHY or DEPLOYING as soon as
    one replica of many dies. A pool without replicas that Serve calls HEALTHY was scaled to zero,
    and one that it calls UPSCALING is on its way back; requests wait for both.
    """
    return all(_serves(pools.get(name, {})) for name in _NEEDED)


def _serves(pool: dict[str, Any]) -> bool:
    return pool.get("replicas", 0) > 0 or pool.get("status") in _RESTING


def pools_of(app: str) -> tuple[Pools, list[str]]:
    """Return the replicas of an application's pools, and the metrics URL of every live node.

    The call blocks while it asks Serve's controller and Ray.
    """
    deployments = serve.status().applications[app].deployments
    pools = {
        name.lower(): {
            "replicas": deployment.replica_states.get(ReplicaState.RUNNING, 0),
            "starting": deployment.replica_states.get(ReplicaState.STARTING, 0),
            "stopping": deployment.replica_states.get(ReplicaState.STOPPING, 0),
            "status": deployment.status.value,
        }
        for name, deployment in deployments.items()
    }
    metrics = [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]
    return pools, metrics


def statuses_of(app: str) -> Engines:
    """Return the status of an application's engines; the call blocks while it asks them.

    Engines that do not answer within 5 seconds are listed as unavailable.
    """
    asked = {name: actor.status.remote() for name, actor in engines_of(app).items()}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_TIMEOUT_S)
    return [_ledger(name, status) for name, status in sorted(asked.items())]


def _ledger(name: str, asked: Any) -> dict[str, Any]:
    _, pool, replica = name.rsplit("/", 2)
    entry: dict[str, Any] = {"name": f"{pool.lower()}/{replica}", "pool": pool.lower()}
    try:
        status: EngineStatus = ray.get(asked, timeout=0)
    except Exception:  # loading, stopping, closed or too slow
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


def _repeat(look: Callable[[], None]) -> None:
    """Look once a second, for ever; a look that fails leaves what was seen before."""
    is_blind = False
    while True:
        try:
            look()
            is_blind = False
        except Exception as error:  # the controller is away, for example
            if not is_blind:
                _log.warning("the state of the application cannot be seen: %r", error)
            is_blind = True
        time.sleep(_EVERY_S)
