"""Placement of replicas: pure functions from a pool's settings to Serve deployment options.

A replica that holds a model is two actors: the Serve replica, which only keeps leases, and its
engine. With GPUs, or on several nodes, both share a placement group with one bundle on each node:
the replica takes `num_cpus` of the first and the engine the rest. Otherwise the engine is pinned to
its replica's node. A replica without an engine, like the retriever's, holds its GPU itself.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from rapid.config import Finite, Frozen

_METRICS_INTERVAL_S = 0.5  # between two reports to the autoscaler, which looks back at least two
_REPORTS_PERIOD_S = 1.0  # between two collections of a replica's report by Serve's controller
_HEALTH_CHECK_PERIOD_S = 1.0  # a dead replica is detected and replaced at the next check
_HEALTH_CHECK_TIMEOUT_S = 5.0  # a hung one after three; user code does not run on the loop asked
_QUEUED_PER_LEASE = 8  # requests that may wait for each lease of a pool with all its replicas
_QUEUED = 256  # requests that may wait for a pool without leases: as many as its caller holds
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"  # of Kubernetes, which Ray took over
_LABEL_KEY = re.compile(rf"({_LABEL}/)?{_LABEL}")
_LABEL_SELECTOR = re.compile(rf"!?({_LABEL}|in\({_LABEL}(, ?{_LABEL})*\))")


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_SELECTOR.fullmatch(value):
            raise ValueError(
                f"{key!r}: {value!r} is not a label selector of Ray: write key: value, "
                "key: in(one, other), or either after a ! for nodes that are not so"
            )
    return labels


class PoolConfig(Frozen):
    """The number of replicas of a deployment and the resources of each.

    Attributes:
        min_replicas: Fewest replicas.
        max_replicas: Most replicas.
        target_ongoing_requests: Requests per replica that the autoscaler aims at. A lease is one
            request for as long as it is held, so for engines this counts live leases.
        max_ongoing_requests: Most requests that a replica takes at once; replicas with an engine
            take the engine's `max_leases` instead.
        max_queued_requests: Most requests that wait at each process that calls the pool; further
            ones are refused. None is 256, and for engines eight times the leases of all replicas.
        first_token_goal_s: Seconds to the first token that are aimed at, for pools of engines: a
            document is read by another replica, and replicas are added, where waiting prompts would
            take longer.
        upscale_delay_s: Seconds that high load must last before replicas are added.
        downscale_delay_s: Seconds that low load must last before replicas are removed.
        graceful_shutdown_timeout_s: Seconds that a removed replica may take to finish its requests.
        max_surge_percent: Replicas that may run beyond the pool's number while new ones replace old
            ones, in percent of it, rounded up: an old replica leaves when a new one has loaded.
            Without room for one more the replacement waits; with 0 old replicas leave first.
        num_cpus: Logical CPUs of the replica; a reservation, not a limit.
        num_gpus: GPUs of the engine, or of the replica where there is no engine. A fraction shares
            one GPU; more than one is a group on one machine, or an equal part on each of `nodes`.
        nodes: Nodes that each engine is spread over, with an equal part of its processes
            (`tensor_parallel`) and of its GPUs on each.
        accelerator: Ray's name of the GPU type, for a cluster that has several.
        node_labels: Labels that the nodes of all replicas have, as Ray's label selectors. So
            one-GPU replicas leave the nodes alone that a group of four needs whole.
        engine_cpus: Logical CPUs of the engine on each node, when it has a GPU or several nodes.
    """

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: Finite = Field(8.0, gt=0)
    max_ongoing_requests: int = Field(64, ge=1)
    max_queued_requests: int | None = Field(None, ge=1)
    first_token_goal_s: Finite = Field(10.0, gt=0)
    upscale_delay_s: Finite = Field(2.0, ge=0)
    downscale_delay_s: Finite = Field(20.0, ge=0)
    graceful_shutdown_timeout_s: Finite = Field(600.0, ge=0)
    max_surge_percent: int = Field(25, ge=0, le=100)
    num_cpus: Finite = Field(0.1, ge=0)
    num_gpus: Finite = Field(0.0, ge=0)
    nodes: int = Field(1, ge=1, le=64)
    accelerator: str | None = None
    node_labels: Annotated[dict[str, str], AfterValidator(_check_labels)] = Field(
        default_factory=dict
    )
    engine_cpus: Finite = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _counts_are_ordered(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas ({self.max_replicas}) is below min_replicas ({self.min_replicas}): "
                "raise max_replicas"
            )
        return self

    @model_validator(mode="after")
    def _gpus_are_whole_above_one(self) -> Self:
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(
                f"num_gpus ({self.num_gpus}) must be whole above 1: Ray shares one GPU, not a group"
            )
        return self

    @model_validator(mode="after")
    def _nodes_have_equal_parts(self) -> Self:
        if self.nodes > 1 and self.num_gpus % self.nodes:
            raise ValueError(
                f"num_gpus ({self.num_gpus:g}) are those of all nodes together, and nodes "
                f"({self.nodes}) does not divide them: every node gives an engine as many"
            )
        if self.nodes > 1 and not self.num_gpus and not self.engine_cpus:
            raise ValueError("engine_cpus: 0 reserves nothing on the other nodes: raise it")
        return self

    @property
    def has_group(self) -> bool:
        """Whether each engine of the pool has a placement group."""
        return bool(self.num_gpus) or self.nodes > 1


class RequestPoolConfig(PoolConfig):
    """The pool of a deployment whose replicas hold requests and compute little."""

    target_ongoing_requests: Finite = Field(64.0, gt=0)
    max_ongoing_requests: int = Field(256, ge=1)


def num_queued(pool: PoolConfig, max_leases: int | None = None) -> int:
    """Return how many requests may wait for a pool at each process that calls it."""
    if pool.max_queued_requests is not None:
        return pool.max_queued_requests
    if max_leases is None:
        return _QUEUED
    return _QUEUED_PER_LEASE * max_leases * pool.max_replicas


def deployment_options(
    pool: PoolConfig,
    max_leases: int | None = None,
    *,
    has_affinity: bool = False,
    is_scaled_by_lag: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments of ``serve.deployment(...)`` for a pool.

    Args:
        pool: Settings of the pool.
        max_leases: Leases of the engine that each replica starts; None for a pool without engines.
        has_affinity: Whether `cluster.affinity` chooses the replica: the one that owns a request's
            name, and none that has just failed. For a lease it always does.
        is_scaled_by_lag: Whether the replicas report how late their event loops are.
    """
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": pool.num_cpus},
        "max_ongoing_requests": max_leases or pool.max_ongoing_requests,
        "max_queued_requests": num_queued(pool, max_leases),
        "graceful_shutdown_timeout_s": pool.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_surge_percent": pool.max_surge_percent,
        "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
        "autoscaling_config": {
            "min_replicas": pool.min_replicas,
            "max_replicas": pool.max_replicas,
            "target_ongoing_requests": pool.target_ongoing_requests,
            "upscale_delay_s": pool.upscale_delay_s,
            "downscale_delay_s": pool.downscale_delay_s,
            "metrics_interval_s": _METRICS_INTERVAL_S,
            "look_back_period_s": max(2 * _METRICS_INTERVAL_S, pool.upscale_delay_s),
        },
    }
    if is_scaled_by_lag:
        options["autoscaling_config"]["policy"] = {
            "policy_function": "cluster.autoscaling:OrchestratorPolicy"
        }
    elif max_leases is not None:
        options["autoscaling_config"]["policy"] = {
            "policy_function": "cluster.autoscaling:EnginePolicy",
            "policy_kwargs": {"first_token_goal_s": pool.first_token_goal_s},
        }
    if max_leases is not None or has_affinity:
        options["request_router_config"] = {
            "request_router_class": "cluster.copied_router.CopiedRouter",
            "request_router_kwargs": {
                "target_ongoing_requests": pool.target_ongoing_requests,
                "first_token_goal_s": pool.first_token_goal_s,
            },
            "request_routing_stats_period_s": _REPORTS_PERIOD_S,
        }
    if max_leases is None:  # else a check also waits for the engine, which may be loading
        options["health_check_timeout_s"] = _HEALTH_CHECK_TIMEOUT_S
    has_group = pool.has_group and max_leases is not None
    if has_group:
        others = [_bundle(pool, 0.0)] * (pool.nodes - 1)
        options["placement_group_bundles"] = [_bundle(pool, pool.num_cpus), *others]
        options["placement_group_strategy"] = "STRICT_SPREAD" if others else "STRICT_PACK"
    elif pool.num_gpus:
        options["ray_actor_options"] |= _gpus(pool)
    if pool.node_labels and has_group:
        options["placement_group_bundle_label_selector"] = [pool.node_labels] * pool.nodes
    elif pool.node_labels:
        options["ray_actor_options"]["label_selector"] = pool.node_labels
    return options


def engine_options(pool: PoolConfig, node_id: str) -> dict[str, Any]:
    """Return what a replica's engine has on each of its nodes, as options of ``ray.remote(...)``.

    Args:
        pool: Settings of the pool.
        node_id: Ray's hex id of the replica's node.
    """
    # Without a GPU all engines share the machine's cores, and a share reserved for each would limit
    # how many deployments fit on a laptop. Ray would then start it anywhere, so it is pinned.
    if not pool.has_group:
        return {"num_cpus": 0, "label_selector": {"ray.io/node-id": node_id}}
    return {"num_cpus": pool.engine_cpus} | _gpus(pool)


def _gpus(pool: PoolConfig) -> dict[str, Any]:
    gpus: dict[str, Any] = {"num_gpus": pool.num_gpus / pool.nodes}
    if pool.accelerator:
        gpus["accelerator_type"] = pool.accelerator
    return gpus


def _bundle(pool: PoolConfig, more_cpus: float) -> dict[str, float]:
    bundle = {"CPU": pool.engine_cpus + more_cpus}
    if pool.num_gpus:
        bundle["GPU"] = pool.num_gpus / pool.nodes
    if pool.accelerator:
        bundle[f"accelerator_type:{pool.accelerator}"] = 0.001
    return bundle
