"""Shares of tenants, by hand: who may have how much while others ask, here and elsewhere."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from deployments.api.gate.gossip import Board
from deployments.api.gate.shares import Shares, fair_share


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shares(clock: Clock) -> Shares:
    shares = Shares(clock)
    shares.configure(20, 8)
    return shares


def taken(shares: Shares, tenant: str, stack: ExitStack, most: int = 50) -> int:
    """Let a tenant ask until it is refused; return how many requests it then has."""
    for _ in range(most):
        if not shares.admits(tenant):
            break
        stack.enter_context(shares.hold(tenant))
    return shares.num_held(tenant)


@pytest.mark.parametrize(
    ("others", "share"),
    [
        ([], 8),
        ([0], 8),
        ([1], 7),
        ([4], 4),
        ([50], 4),
        ([1, 50], 3),
        ([1, 1, 1], 5),
        ([50] * 3, 2),
        ([50] * 20, 0),
    ],
)
def test_what_others_do_not_want_is_left_to_who_wants_more(others: list[int], share: int) -> None:
    assert fair_share(8, [(each, 1) for each in others]) == share


@pytest.mark.parametrize(
    ("others", "weight", "share"),
    [
        ([(50, 1)], 3, 6),
        ([(50, 3)], 1, 2),
        ([(2, 3)], 1, 6),  # who wants less than its share leaves the rest
        ([(1, 1), (50, 3)], 1, 1),
        ([(4, 4), (2, 1)], 1, 2),  # by weight the first wants less than the second
        ([(50, 1000)], 1, 0),
    ],
)
def test_a_tenant_has_as_many_shares_as_it_weighs(
    others: list[tuple[int, int]], weight: int, share: int
) -> None:
    assert fair_share(8, others, weight) == share


def test_a_weight_changes_while_a_tenant_asks(shares: Shares, clock: Clock) -> None:
    with ExitStack() as crowd, ExitStack() as guest:
        taken(shares, "crowd", crowd)
        assert taken(shares, "guest", guest) == 4
        shares.configure(20, 8, {"guest": 3})
        assert taken(shares, "guest", guest) == 6
        assert shares.share("crowd") == 2


def test_a_tenant_alone_may_have_all_that_is_shared(shares: Shares, clock: Clock) -> None:
    with ExitStack() as stack:
        assert taken(shares, "crowd", stack) == 8
        clock.now += 60.0  # what it had meanwhile was all of it, so that it has no credit
        assert taken(shares, "crowd", stack) == 8
    clock.now += 60.0
    assert taken(shares, "crowd", ExitStack()) == 20


def test_a_newcomer_has_its_share_at_once_and_a_crowd_falls_to_its_own(
    shares: Shares, clock: Clock
) -> None:
    with ExitStack() as crowd, ExitStack() as guest:
        taken(shares, "crowd", crowd)
        assert taken(shares, "guest", guest) == 4
        clock.now += 1.0
        assert not shares.admits("crowd")
        crowd.close()  # its answers end
        assert taken(shares, "crowd", crowd) == 4


def test_a_crowd_that_arrives_has_no_credit_and_a_guest_that_was_there_has(
    shares: Shares, clock: Clock
) -> None:
    with ExitStack() as crowd, ExitStack() as guest:
        taken(shares, "guest", guest, most=1)
        clock.now += 60.0
        assert taken(shares, "crowd", crowd) == 7  # all but what the guest has
        assert taken(shares, "guest", guest) == 20
        clock.now += 1.0  # 16 more than its share: no credit is left for another second
        guest.pop_all().close()
        for _ in range(4):
            guest.enter_context(shares.hold("guest"))
        assert not shares.admits("guest")


def test_a_little_credit_lets_no_crowd_in(shares: Shares, clock: Clock) -> None:
    """A crowd that is without places for a tenth of a second saves .4 of a place."""
    with ExitStack() as crowd, ExitStack() as guest:
        taken(shares, "guest", guest)
        assert taken(shares, "crowd", crowd) == 4
        crowd.close()
        clock.now += 0.1
        assert taken(shares, "crowd", crowd) == 4
        crowd.close()
        clock.now += 0.4
        assert taken(shares, "crowd", crowd) == 6


def test_what_was_wanted_is_remembered_for_some_seconds(shares: Shares, clock: Clock) -> None:
    with ExitStack() as crowd:
        with ExitStack() as guest:
            taken(shares, "guest", guest, most=3)
        clock.now += 2.5
        assert taken(shares, "crowd", crowd) == 5
        clock.now += 2.5
        assert shares.use() == {"crowd": (5, 6)}
        assert taken(shares, "crowd", crowd) == 8 + 7  # the last by credit


def test_requests_elsewhere_count(shares: Shares) -> None:
    with ExitStack() as stack:
        shares.learn({"crowd": (3, 40), "guest": (0, 2)})
        assert shares.num_held("crowd") == 3
        assert taken(shares, "crowd", stack) == 6  # two are left to the guest
        assert shares.use() == {"crowd": (3, 7)}
        shares.learn({"guest": (1, 9)})
        assert shares.share("crowd") == 4
        assert taken(shares, "guest", stack) == 4


def test_without_tenants_there_is_one_bound(shares: Shares) -> None:
    shares.configure(5, None)
    assert not shares.are_shared
    with ExitStack() as stack:
        shares.learn({"other": (3, 40)})
        assert taken(shares, "local", stack) == 5


def test_a_tenant_that_asks_everywhere_wants_no_more_for_it(clock: Clock) -> None:
    """One request at a time, through one ingress after the other."""
    board, ingresses = Board(clock), {name: Shares(clock) for name in "abc"}
    for shares in ingresses.values():
        shares.configure(20, 8)
    for _ in range(2):
        for name, shares in ingresses.items():
            assert shares.admits("guest")
            with shares.hold("guest"):
                board.tell(name, shares.use())
            shares.learn(board.tell(name, shares.use()))
            clock.now += 0.1
    assert [shares.share("crowd") for shares in ingresses.values()] == [7, 7, 7]
