"""Who is left alone: replicas that have just failed, while there is another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.circuit_breaker import CircuitBreaker

A, B, C = (SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc")


def names(replicas: Any) -> str:
    return "".join(each.replica_id.unique_id for each in replicas)


def test_a_replica_that_failed_is_left_alone_for_ten_seconds() -> None:
    now = [0.0]
    blame = CircuitBreaker(lambda: now[0])
    blame.put("b")
    now[0] = 9.9
    assert names(blame.spare([A, B, C])) == "ac"
    blame.put("c")
    assert names(blame.spare([A, B, C])) == "a"
    now[0] = 10.0
    assert names(blame.spare([A, B, C])) == "ab"
    now[0] = 19.9
    assert names(blame.spare([A, B, C])) == "abc"


def test_where_all_failed_all_are_tried() -> None:
    blame = CircuitBreaker(lambda: 0.0)
    blame.put("a")
    blame.put("b")
    assert names(blame.spare([A, B])) == "ab"
    assert names(blame.spare([])) == ""
