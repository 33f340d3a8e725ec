"""How many replicas are wanted: tables of pools, and Serve's contexts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve.config import AutoscalingConfig

from cluster.autoscaling import (
    EngineLoad,
    EnginePolicy,
    OrchestratorPolicy,
    PoolState,
    engines_wanted,
    orchestrators_wanted,
)
from cluster.placement import PoolConfig, deployment_options

IDLE = EngineLoad(0, 0, 1000, 0)


def load(requests: float = 0, pages: float = 0, waiting_s: float = 0) -> EngineLoad:
    return EngineLoad(requests, pages, 1000, waiting_s)


def wanted(target: int, *loads: EngineLoad | None, queued: float = 0, **state: Any) -> int:
    """For replicas that should have 4 requests, and 10 s to the first token."""
    pool = PoolState(target, loads, queued, **state)
    return engines_wanted(pool, target_ongoing=4, first_token_goal_s=10)


@pytest.mark.parametrize(
    ("target", "loads", "queued", "expected"),
    [
        (1, [load(requests=4)], 0, 1),
        (1, [load(requests=5)], 0, 2),
        (1, [load(requests=4)], 1, 2),
        (1, [load(pages=850)], 0, 1),
        (1, [load(pages=851)], 0, 2),
        (1, [load(waiting_s=10)], 0, 1),
        (1, [load(waiting_s=31)], 0, 4),
        (2, [load(pages=900), load(pages=900)], 0, 3),
        (2, [load(waiting_s=40), IDLE], 0, 4),
        (1, [IDLE], 0, 0),  # Serve keeps the pool's least number
        (0, [], 0, 0),
        (3, [], 5, 3),  # none runs yet
    ],
)
def test_replicas_are_added_for_the_largest_need(
    target: int, loads: Sequence[EngineLoad | None], queued: float, expected: int
) -> None:
    assert wanted(target, *loads, queued=queued) == expected


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (load(requests=2.1), 2),  # one replica would do, just
        (load(requests=1.61), 2),
        (load(requests=1.6), 1),  # one would carry a quarter more
        (load(pages=341), 2),
        (load(pages=340), 1),
        (load(waiting_s=4), 1),
        (load(waiting_s=4.1), 2),
    ],
)
def test_a_replica_is_removed_only_where_the_rest_has_room_to_spare(
    each: EngineLoad, expected: int
) -> None:
    assert wanted(2, each, each) == expected


def test_a_large_pool_shrinks_step_by_step() -> None:
    assert wanted(100, *([IDLE] * 100)) == 75
    assert wanted(3, IDLE, IDLE, IDLE) == 2
    assert wanted(1, IDLE) == 0


def test_a_pool_at_the_edge_does_not_change_back_and_forth() -> None:
    """Whatever the load is, decisions come to rest, and never turn back on the way."""
    for tenths in range(1, 400):
        numbers = [5]
        for _ in range(12):
            each = load(requests=tenths / 10 / numbers[-1])
            numbers.append(wanted(numbers[-1], *([each] * numbers[-1])))
        assert numbers[-1] == numbers[-2]
        assert numbers in (sorted(numbers), sorted(numbers, reverse=True))


def test_nothing_is_removed_while_a_report_is_stale() -> None:
    assert wanted(3, IDLE, IDLE, None) == 3
    assert wanted(3, None, None, None) == 3
    assert wanted(2, load(requests=4), None) == 2
    assert wanted(2, load(requests=5), None) == 3  # the silent one is taken for as busy


def test_what_is_draining_is_no_reason_to_drain_more() -> None:
    busy = load(requests=2)
    assert wanted(3, busy, busy) == 2
    assert wanted(2, busy) == 1
    assert wanted(2, busy, draining=[busy]) == 2  # its answers end there, their like comes here
    assert wanted(2, busy, draining=[load(requests=100)]) == 2  # and none is added for it


@pytest.mark.parametrize(
    ("target", "lags_ms", "requests", "expected"),
    [
        (1, [2.0], 10, 1),
        (1, [2.0], 65, 2),
        (1, [15.0], 10, 2),
        (1, [15.0], 0, 1),  # a machine that is busy with something else
        (2, [15.0, 15.0], 10, 3),
        (4, [100.0] * 4, 10, 8),  # at most twice as many at once
        (2, [5.0, 5.0], 10, 2),  # too late to remove one
        (2, [2.0, 2.0], 10, 1),
        (2, [2.0, None], 10, 2),
        (2, [None, None], 10, 2),
        (2, [None, None], 200, 4),
    ],
)
def test_orchestrators_are_added_where_their_loops_are_late(
    target: int, lags_ms: list[float | None], requests: float, expected: int
) -> None:
    lags = [None if each is None else each / 1000 for each in lags_ms]
    assert orchestrators_wanted(target, lags, requests, target_ongoing=64) == expected


class Series:
    """What Serve's controller would know of these replicas."""

    def __init__(self, **replicas: dict[str, float]) -> None:
        self.ids = {name: SimpleNamespace(unique_id=name) for name in replicas}
        self.stats = replicas
        self.at = dict.fromkeys(replicas, 100.0)

    def context(self, now: float, target: int, state: Any = None, **values: Any) -> Any:
        names = {name for stats in self.stats.values() for name in stats}
        metrics = {
            name: {
                _Id(replica): [SimpleNamespace(timestamp=self.at[replica], value=stats[name])]
                for replica, stats in self.stats.items()
                if name in stats
            }
            for name in names
        }
        config = AutoscalingConfig(
            min_replicas=0, max_replicas=9, target_ongoing_requests=4, downscale_delay_s=20
        )
        given = {"total_queued_requests": 0.0, "total_num_requests": 0.0} | values
        return SimpleNamespace(
            current_time=now,
            raw_metrics=metrics,
            running_replicas=[_Id(name) for name in self.stats],
            target_num_replicas=target,
            policy_state=state or {},
            config=config,
            **given,
        )


class _Id(str):
    """A replica's id, which can be a key."""

    @property
    def unique_id(self) -> str:
        return str(self)


def stats(requests: float = 0, pages: float = 0, tokens: float = 0) -> dict[str, float]:
    return {
        "num_requests": requests,
        "pages_free": 1000 - pages,
        "pages_total": 1000,
        "tokens_waiting": tokens,
        "prefill_tokens_per_s": 500.0,
    }


def test_the_policy_reads_what_replicas_report() -> None:
    policy = EnginePolicy(first_token_goal_s=5.0)
    series = Series(a=stats(requests=1), b=stats(tokens=10_000))
    assert policy(series.context(100.0, 1))[0] == 4
    assert policy(series.context(100.0, 1, total_queued_requests=30.0))[0] == 8
    assert policy(series.context(106.0, 1))[0] == 1  # all is stale: as it was
    assert policy(Series(a={}).context(100.0, 2))[0] == 2
    assert policy(Series().context(100.0, 0))[0] == 0


def test_the_policy_remembers_for_a_while_what_it_has_removed() -> None:
    policy = EnginePolicy()
    both = Series(a=stats(requests=3), b=stats(requests=3))
    number, state = policy(both.context(100.0, 2))
    assert number == 2
    alone = Series(a=stats(requests=1))
    alone.at["a"] = 110.0
    number, state = policy(alone.context(110.0, 2, state))
    assert number == 2
    alone.at["a"] = 121.0
    assert policy(alone.context(121.0, 2, state))[0] == 1


def test_the_policy_of_orchestrators_reads_how_late_they_are() -> None:
    series = Series(a={"loop_lag_s": 0.03})
    assert OrchestratorPolicy()(series.context(100.0, 1))[0] == 1
    assert OrchestratorPolicy()(series.context(100.0, 1, total_num_requests=1.0))[0] == 2
    assert OrchestratorPolicy()(series.context(106.0, 1, total_num_requests=1.0))[0] == 1
    assert OrchestratorPolicy()(series.context(100.0, 1, total_num_requests=9.0))[0] == 3


@pytest.mark.parametrize(
    ("options", "policy"),
    [({"max_leases": 4}, EnginePolicy), ({"is_scaled_by_lag": True}, OrchestratorPolicy)],
)
def test_serve_can_send_a_policy_to_its_controller(options: Any, policy: type) -> None:
    config = deployment_options(PoolConfig(first_token_goal_s=5), **options)["autoscaling_config"]
    configured = AutoscalingConfig(**config).policy
    sent = cloudpickle.loads(configured.get_serialized_policy_def())
    decide = sent(**configured.policy_kwargs)
    engines = Series(a=stats(tokens=10_000) | {"loop_lag_s": 0.03})
    context = engines.context(100.0, 1, total_num_requests=1.0)
    assert decide(context)[0] == policy(**configured.policy_kwargs)(context)[0] > 1
