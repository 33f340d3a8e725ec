"""Levels of tenants, by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rapid.work_shares import WorkShares


def served(shares: WorkShares, costs: dict[str, float], turns: int) -> Counter[str]:
    """Serve the lowest of those present, again and again; return the work of each."""
    work = Counter[str]()
    for _ in range(turns):
        tenant = min(costs, key=shares.level)
        shares.charge(tenant, costs[tenant])
        work[tenant] += costs[tenant]  # type: ignore[assignment]
    return work


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 5)])
def test_work_is_shared_by_weight_whatever_a_turn_costs(weights: tuple[int, ...]) -> None:
    shares, costs = WorkShares(), {"a": 1.0, "b": 0.1, "c": 3.0}
    for tenant, weight in zip(costs, weights, strict=True):
        shares.enter(tenant, weight)
    work = served(shares, costs, 10_000)
    each = [work[tenant] / weight for tenant, weight in zip(costs, weights, strict=True)]
    assert max(each) - min(each) <= 3.0 + 1e-6


def test_who_was_away_has_saved_up_nothing_and_owes_what_it_had_too_much() -> None:
    shares = WorkShares()
    shares.enter("a")
    shares.charge("a", 100.0)
    shares.enter("b")
    assert shares.level("b") == shares.level("a") == 100.0
    shares.charge("b", 5.0)
    shares.leave("b")
    shares.charge("a", 2.0)
    shares.enter("b")
    assert (shares.level("a"), shares.level("b")) == (102.0, 105.0)
    shares.leave("b")
    shares.charge("a", 50.0)
    shares.enter("b")
    assert shares.level("b") == 152.0


def test_credit_comes_from_a_pause_and_is_no_more_than_the_queue_gives() -> None:
    shares = WorkShares(most_credit=2.0)
    shares.enter("a")
    shares.charge("a", 100.0)
    assert shares.credit("a") == 0.0  # there is nobody whom it could come before
    shares.enter("b", 3)
    assert (shares.credit("a"), shares.credit("b")) == (0.0, 3 * 2.0)
    shares.charge("b", 4.5)
    assert shares.credit("b") == 1.5
    shares.leave("b")
    shares.charge("a", 1.0)  # of which half a unit's pause is earned
    shares.enter("b", 3)
    assert shares.credit("b") == 3 * 1.5
    shares.charge("b", 100.0)
    assert shares.credit("b") == 0.0


def test_what_was_done_while_nobody_else_was_there_counts_against_nobody() -> None:
    shares = WorkShares()
    shares.enter("a")
    shares.charge("a", 100.0)
    shares.leave("a")
    shares.charge("a", 7.0)  # a step that ended later
    for tenant in "ba":
        shares.enter(tenant)
    assert shares.level("a") == shares.level("b")


def test_who_has_had_less_than_its_share_is_below() -> None:
    shares = WorkShares()
    for tenant in "abc":
        shares.enter(tenant, 3.0 if tenant == "c" else 1.0)
    assert not any(map(shares.is_below, "abc"))  # all are even
    shares.charge("a", 10.0)
    shares.charge("c", 12.0)
    assert [shares.is_below(tenant) for tenant in "abc"] == [False, True, True]
    shares.charge("c", 30.0)
    assert [shares.is_below(tenant) for tenant in "abc"] == [True, True, False]
    shares.leave("b")
    shares.leave("c")
    assert not shares.is_below("a")  # alone


def test_work_that_is_divided_levels_those_who_get_it() -> None:
    rng = random.Random(3)
    for _ in range(200):
        shares = WorkShares()
        tenants = {f"t{number}": rng.randint(1, 4) for number in range(rng.randint(1, 6))}
        for tenant, weight in tenants.items():
            shares.enter(tenant, weight)
        for tenant in tenants:
            shares.charge(tenant, rng.choice([0.0, rng.random()]))
        work = rng.random()
        parts = shares.divide(work, list(tenants))
        assert sum(parts.values()) == pytest.approx(work)
        after = {name: shares.level(name) + parts[name] / tenants[name] for name in tenants}
        common = max(after[name] for name in tenants if parts[name])
        assert all(
            after[name] == pytest.approx(common) if parts[name] else after[name] >= common - 1e-9
            for name in tenants
        )


def test_who_has_left_without_a_debt_is_forgotten() -> None:
    shares = WorkShares()
    shares.enter("stays")
    for number in range(100):
        shares.enter(f"t{number}")
        shares.leave(f"t{number}")
    assert set(shares._levels) == set(shares._weights) == {"stays"}
