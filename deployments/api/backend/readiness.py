"""Readiness of an application, as a snapshot that threads of an ingress replica keep fresh."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.schema import DeploymentStatus, ReplicaState

from deployments.api.backend.heartbeats import Signs, processes_of
from rapid.ports import Clock

_log = logging.getLogger(__name__)

_EVERY_S = 1.0  # between two looks at the pools
_SETTLED_LOOKS = 5  # Serve's answer takes a process tens of milliseconds to read
_ANSWERED_S = 5.0  # after which an answer's progress is no sign of life any more
_STALE_S = 30.0  # while Serve's controller is away; it is back after a few seconds
_RESTING = (DeploymentStatus.HEALTHY.value, DeploymentStatus.UPSCALING.value)
# Those that take requests: with new settings, found by a new controller, or on a node that leaves.
_SERVING = (
    ReplicaState.RUNNING,
    ReplicaState.UPDATING,
    ReplicaState.RECOVERING,
    ReplicaState.PENDING_MIGRATION,
)

Pools = dict[str, dict[str, Any]]


class Readiness:
    """Whether a request to an application would be answered, and the state of its parts.

    A request needs an orchestrator, its target and an ingress, which is where the snapshot is. Of
    the other two Serve's controller must know a replica that takes requests, and its processes
    must have given a sign of life within seconds, or an answer has just made progress here.
    Serve's own word on the application does not count: it says UNHEALTHY or DEPLOYING as soon as
    one replica of many dies. A pool without replicas that Serve calls HEALTHY was scaled to zero,
    and one that it calls UPSCALING is on its way back; requests wait for both.

    `state` answers from memory. Three threads look every second or so: at the pools, which Serve's
    controller knows, for the processes, which Ray knows by name, and at these. None uses the event
    loop that serves the API, a slot of a replica or the orchestrator, so that a saturated
    application still says that it is ready. What was seen of the pools holds for as long as there
    are signs of life: while the controller is away, requests are answered all the same.
    """

    def __init__(
        self,
        app: str,
        targets: Mapping[str, str],
        *,
        look_at_pools: Callable[[str], tuple[Pools, list[str]]] | None = None,
        signs: Signs | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make the snapshot, in which nothing is ready before the first look.

        Args:
            app: The application's name.
            targets: The pool of targets that each orchestrator needs, by its deployment.
            look_at_pools: Function from the name to the pools and the addresses of metrics.
            signs: The signs of life of its processes.
            clock: Monotonic seconds.
        """
        self._app = app
        self._needed = {orchestrator.lower(): target for orchestrator, target in targets.items()}
        needed = {*self._needed, *self._needed.values()}
        self._look_at_pools = look_at_pools or pools_of
        self._signs = signs or Signs(lambda: processes_of(app, self._needed), clock)
        self._clock = clock
        self._seen_at = -math.inf
        self._answered_at = dict.fromkeys(needed, -math.inf)
        self._num_spared = 0
        self._pools: Pools = {}
        self._metrics: list[str] = []
        self._is_stopped = threading.Event()

    def look(self) -> None:
        """Look at everything once, and block until then; what cannot be seen is left as it was."""
        for look in (self.refresh_pools, self._signs.find, self._signs.ask):
            _try_look(look, is_blind=False)

    def start(self) -> None:
        """Start the threads, which end with the process or after `stop`."""
        for look in (self.refresh_pools, self._signs.find, self._signs.ask):
            args = (look, self._is_stopped)
            threading.Thread(target=_repeat, args=args, name="rapid-ready", daemon=True).start()

    def stop(self) -> None:
        """End the threads after their next look; what was seen stays."""
        self._is_stopped.set()

    def state(self, orchestrator: str) -> dict[str, Any]:
        """Return the state; ``ready`` says whether `orchestrator` would answer a request.

        If not, ``reason`` says why.
        """
        reason = self._why_not_ready(orchestrator)
        return {
            "ready": reason is None,
            **({} if reason is None else {"reason": reason}),
            "pools": self._pools,
            "engines": self._signs.engines(),
            "passages": self._signs.passages(),
            "metrics": self._metrics,
        }

    def refresh_pools(self) -> None:
        """Look at the pools, at every fifth call only while nothing is missing.

        What ends a pool that was whole shows in the signs of life.
        """
        is_whole = not any(map(self._why_not_ready, self._needed)) and all(
            pool["replicas"] and pool["status"] == DeploymentStatus.HEALTHY.value
            for pool in self._pools.values()
        )
        self._num_spared = self._num_spared + 1 if is_whole else _SETTLED_LOOKS
        if self._num_spared < _SETTLED_LOOKS:
            return
        self._pools, self._metrics = self._look_at_pools(self._app)
        self._seen_at = self._clock()
        self._num_spared = 0

    def is_silent(self, orchestrator: str, replica: str) -> bool:
        """Return whether an orchestrator's replica has fallen silent while another has not."""
        return self._signs.is_silent(orchestrator, replica)

    def note_progress(self, orchestrator: str) -> None:
        """Note that an answer of an orchestrator has just made progress."""
        now = self._clock()
        self._answered_at |= {orchestrator: now, self._needed[orchestrator]: now}

    def _why_not_ready(self, orchestrator: str) -> str | None:
        target = self._needed[orchestrator]
        return self._why_not(target, has_engines=True) or self._why_not(orchestrator)

    def _why_not(self, name: str, *, has_engines: bool = False) -> str | None:
        """Return why a pool would not answer; None if it would."""
        pool = self._pools.get(name, {})
        now = self._clock()
        if not pool.get("replicas"):
            rests = pool.get("status") in _RESTING and now - self._seen_at <= _STALE_S
            return None if rests else f"no {name} takes requests"
        standings = {self._signs.standing(name, is_engine=False)}
        if has_engines:
            standings.add(self._signs.standing(name, is_engine=True))
        if now - self._answered_at[name] <= _ANSWERED_S:
            standings.discard("silent")  # they are only slow to say so
        return None if standings <= {"alive"} else f"no {name} gives a sign of life"


def pools_of(app: str) -> tuple[Pools, list[str]]:
    """Return the replicas of an application's pools, and the metrics URL of every live node.

    The call blocks while it asks Serve's controller and Ray.
    """
    deployments = serve.status().applications[app].deployments
    pools = {
        name.lower(): {
            "replicas": sum(deployment.replica_states.get(each, 0) for each in _SERVING),
            "starting": deployment.replica_states.get(ReplicaState.STARTING, 0),
            "stopping": deployment.replica_states.get(ReplicaState.STOPPING, 0),
            "status": deployment.status.value,
        }
        for name, deployment in deployments.items()
    }
    return pools, metrics_of_nodes()


def metrics_of_nodes() -> list[str]:
    """Return the metrics URL of every live node; the call blocks while it asks Ray."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]


def _repeat(look: Callable[[], None], is_stopped: threading.Event) -> None:
    """Look once a second until stopped; a look that fails leaves what was seen before."""
    is_blind = False
    while True:
        is_blind = not _try_look(look, is_blind=is_blind)
        if is_stopped.wait(_EVERY_S):
            return


def _try_look(look: Callable[[], None], *, is_blind: bool) -> bool:
    """Look; return whether that worked, and log why not, unless it did not work before."""
    try:
        look()
    except Exception as error:  # the controller is away, for example
        if not is_blind:
            _log.warning("the state of the application cannot be seen: %r", error)
        return False
    return True
