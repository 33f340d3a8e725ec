"""Autoscaling policies: how many replicas a pool should have, from what its replicas report.

`EnginePolicy` and `OrchestratorPolicy` give what Serve's controller knows to the pure functions
`engines_wanted` and `orchestrators_wanted`. Serve applies the limits and the delays of a pool
afterwards, and copies the policies into its controller with all that they use of this module.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from cluster.reports import REPORTS_STALE_S

_PAGES_GOAL = 0.85
_SPARE = 1.25  # none is removed that leaves less: at the edge a pool would go back and forth
_LAG_GOAL_S = 0.01
_MOST_GROWTH = 2.0  # lateness does not grow in proportion to load
_MOST_SHRINKAGE = 0.25  # at once: with a replica the documents go that it has read


@dataclass(frozen=True)
class EngineLoad:
    """The load of one engine replica, or of several together.

    Attributes:
        pages_used: KV pages that a new lease cannot have.
        waiting_s: Seconds that reading what waits takes; 0 while the speed is not known.
    """

    num_requests: float = 0.0
    pages_used: float = 0.0
    pages_total: float = 0.0
    waiting_s: float = 0.0

    def __add__(self, other: EngineLoad) -> EngineLoad:
        return EngineLoad(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class PoolState:
    """The state of a pool of engines, from which `engines_wanted` decides its size.

    Attributes:
        target: Replicas that were decided on last.
        loads: Loads of the running replicas; None for one whose report is missing or stale.
        queued: Requests that no replica has taken.
        draining: Load of replicas that were removed lately, when they were last heard of. They
            finish what they have; its like will come back to the others.
    """

    target: int
    loads: Sequence[EngineLoad | None]
    queued: float = 0.0
    draining: Sequence[EngineLoad] = ()


def engines_wanted(state: PoolState, *, target_ongoing: float, first_token_goal_s: float) -> int:
    """Return how many engine replicas a pool should have; Serve applies limits and delays.

    The largest of three needs counts: requests, KV pages, and seconds of reading that wait. A
    replica without a report is taken for an average one; as long as there is one, none is removed.

    Args:
        target_ongoing: Requests that a replica should have.
        first_token_goal_s: Seconds in which waiting prompts should be read.
    """
    known = [load for load in state.loads if load is not None]
    if not known:
        return state.target
    total = sum(known, EngineLoad())
    unknown = len(state.loads) / len(known)
    pages_each = total.pages_total / len(known)

    def count_needed(load: EngineLoad, queued: float) -> float:
        needs = [
            (unknown * load.num_requests + queued) / target_ongoing,
            unknown * load.waiting_s / first_token_goal_s,
        ]
        if pages_each:
            needs.append(unknown * load.pages_used / (_PAGES_GOAL * pages_each))
        return max(needs)

    more = math.ceil(count_needed(total, state.queued))
    if more >= state.target:
        return more
    if len(known) < len(state.loads):
        return state.target
    enough = math.ceil(_SPARE * count_needed(sum(state.draining, total), state.queued))
    least = math.floor((1 - _MOST_SHRINKAGE) * state.target)
    return min(max(enough, least), state.target)


def orchestrators_wanted(
    target: int, lags_s: Sequence[float | None], num_requests: float, *, target_ongoing: float
) -> int:
    """Return how many orchestrators there should be; Serve applies limits and delays.

    Args:
        target: Replicas that were decided on last.
        lags_s: How late the event loop of each running replica is, in seconds; None if unknown.
        num_requests: Requests at all of them and before them.
        target_ongoing: Requests that one should have.
    """
    known = [lag for lag in lags_s if lag is not None]
    by_requests = math.ceil(num_requests / target_ongoing)
    if not known:
        return max(by_requests, target)
    lag_s = sum(known) / len(known)
    if lag_s > _LAG_GOAL_S and num_requests:  # without requests a late loop is the machine's doing
        return max(by_requests, math.ceil(len(lags_s) * min(lag_s / _LAG_GOAL_S, _MOST_GROWTH)))
    if by_requests >= target:
        return by_requests
    is_calm = len(known) == len(lags_s) and lag_s < _LAG_GOAL_S / 4
    fewer = math.ceil(_SPARE * num_requests / target_ongoing)
    return min(fewer, target) if is_calm else target


# --- Serve's side --------------------------------------------------------------------------------


class EnginePolicy:
    """Serve's autoscaling policy for a pool of engines."""

    def __init__(self, first_token_goal_s: float = 10.0) -> None:
        self._first_token_goal_s = first_token_goal_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas for Serve's `AutoscalingContext`, and a state."""
        now = context.current_time
        stats = latest(context.raw_metrics or {}, now)
        running = [each.unique_id for each in context.running_replicas]
        loads = {
            replica: load_of(stats[replica]) if replica in stats else None for replica in running
        }
        heard: dict[str, tuple[float, EngineLoad]] = {
            replica: (at, load)
            for replica, (at, load) in context.policy_state.get("heard", {}).items()
            if now - at <= context.config.downscale_delay_s or replica in loads
        }
        heard |= {replica: (now, load) for replica, load in loads.items() if load is not None}
        state = PoolState(
            context.target_num_replicas,
            list(loads.values()),
            context.total_queued_requests,
            [load for replica, (_, load) in heard.items() if replica not in loads],
        )
        wanted = engines_wanted(
            state,
            target_ongoing=context.config.get_target_ongoing_requests(),
            first_token_goal_s=self._first_token_goal_s,
        )
        return wanted, {"heard": heard}


class OrchestratorPolicy:
    """Serve's autoscaling policy for orchestrators."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas for Serve's `AutoscalingContext`, and no state."""
        stats = latest(context.raw_metrics or {}, context.current_time)
        lags = [
            stats.get(each.unique_id, {}).get("loop_lag_s") for each in context.running_replicas
        ]
        wanted = orchestrators_wanted(
            context.target_num_replicas,
            lags,
            context.total_num_requests,
            target_ongoing=context.config.get_target_ongoing_requests(),
        )
        return wanted, {}


def latest(
    metrics: Mapping[str, Mapping[Any, Sequence[Any]]], now: float
) -> dict[str, dict[str, float]]:
    """Return each replica's latest metrics, by its unique id, without those that are stale.

    `metrics` has Serve's time series by the metric's name and the replica; `now` is in seconds
    since the epoch.
    """
    stats: dict[str, dict[str, float]] = {}
    for name, by_replica in metrics.items():
        for replica, series in by_replica.items():
            if series and now - series[-1].timestamp <= REPORTS_STALE_S:
                stats.setdefault(replica.unique_id, {})[name] = series[-1].value
    return stats


def load_of(stats: Mapping[str, float]) -> EngineLoad | None:
    """Return the load that an engine's numbers say; None if they are none (`cluster.reports`)."""
    if "pages_total" not in stats:
        return None
    speed = stats["prefill_tokens_per_s"]
    return EngineLoad(
        stats["num_requests"],
        stats["pages_total"] - stats["pages_free"],
        stats["pages_total"],
        stats["tokens_waiting"] / speed if speed else 0.0,
    )
