"""`rapid.engines.parallel.gang`: one order at a time, and none after one that failed."""

from __future__ import annotations

import threading

import pytest

from rapid.engines.parallel.gang import Gang
from rapid.engines.parallel.orders import Meet, Order
from rapid.errors import EngineFailed


class Told:
    """Followers that take note; they are told of a loss once `waits_for` has ended."""

    is_broken = False
    waits_for: threading.Thread

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.lost: list[str] = []

    def tell_all(self, order: Order) -> None:
        self.orders.append(order)

    def lose(self, why: str) -> None:
        if threading.current_thread() is not self.waits_for:
            self.waits_for.join(10)
        self.lost.append(why)


def test_an_order_that_waited_for_one_that_failed_is_not_given() -> None:
    followers, gang = Told(), Gang.__new__(Gang)
    gang._turn, gang._followers = threading.Lock(), followers  # type: ignore[assignment]
    refused: list[EngineFailed] = []

    def waits() -> None:
        try:
            with gang.give_order(Meet()):
                pass
        except EngineFailed as error:
            refused.append(error)

    def fails() -> None:
        with gang.give_order(Meet()):
            followers.waits_for.start()
            raise ZeroDivisionError

    followers.waits_for = threading.Thread(target=waits)
    with pytest.raises(ZeroDivisionError):
        fails()
    assert (len(followers.orders), len(refused)) == (1, 1)
