"""The ledger on a clock that is set by hand: room, queue, expiry."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rapid.engines.kv_cache import PagePool
from rapid.engines.leases import Lease, LeaseLedger, Waiter
from rapid.errors import BadRequest, LeaseNotFound, OutOfStep, PromptTooLong
from rapid.messages import LeaseRequest, as_prompt
from tests.rapid.tiny_models import lease_request, random_prompt


@dataclass
class ManualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Ledger(LeaseLedger):
    """A ledger that remembers whom it let in."""

    def __init__(self, num_pages: int = 20, max_leases: int = 4) -> None:
        self.hands = ManualClock()
        super().__init__(PagePool(num_pages), 8, max_leases, 128, 10.0, self.hands)
        self.admitted: list[str] = []

    def ask(self, lease_id: str, num_tokens: int, **settings: object) -> Waiter:
        """A lease of `num_tokens`, 10 of them for the longest block; no two begin alike."""
        prompt = random_prompt(num_tokens - 4 - 10, seed=sum(map(ord, lease_id)))
        return self.request(lease_request(lease_id, prompt, max_tokens=4, **settings))

    def request(self, request: LeaseRequest) -> Waiter:
        waiter = self.prepare(request, self._remember)
        self.submit(waiter)
        return waiter

    def _remember(self, lease: Lease | None) -> None:
        self.admitted.append(lease.lease_id if lease else "none")


def test_a_lease_reserves_all_it_can_ever_need() -> None:
    ledger = Ledger()
    ledger.ask("a", 41)
    assert ledger.status().kv_pages_in_use == 6
    assert ledger.get("a").sequences[0].table.num_tokens == 48
    ledger.release("a")
    assert ledger.status().kv_pages_in_use == 0
    ledger.check_integrity()


def test_those_who_wait_come_in_in_order_even_if_a_later_one_would_fit() -> None:
    ledger = Ledger()
    ledger.ask("a", 80)
    ledger.ask("b", 120)
    ledger.ask("c", 24)
    assert ledger.admitted == ["a"]
    ledger.check_integrity()
    ledger.release("a")
    assert ledger.admitted == ["a", "b", "c"]
    ledger.check_integrity()


def test_a_place_is_needed_as_well_as_pages() -> None:
    ledger = Ledger(max_leases=1)
    ledger.ask("a", 24)
    waiter = ledger.ask("b", 24)
    assert ledger.status().leases_open == 1
    assert ledger.withdraw(waiter)  # type: ignore[arg-type]
    ledger.release("a")
    assert ledger.admitted == ["a"]
    assert ledger.status().leases_open == 0


def test_first_leases_leave_room_for_their_companions() -> None:
    """An engine that drafts for itself: of four places, two requests get two each."""
    ledger = Ledger()
    for request in "abc":
        ledger.ask(request, 24, companion_tokens=10)
    assert ledger.admitted == ["a", "b"]
    ledger.check_integrity()
    for request in "ab":  # ahead of c, which has waited longer
        ledger.ask(f"{request}-draft", 24, beside=request)
    assert ledger.admitted == ["a", "b", "a-draft", "b-draft"]
    ledger.release("a")  # one place is not enough for c and its companion
    assert len(ledger.admitted) == 4
    ledger.release("a-draft")
    assert ledger.admitted[4:] == ["c"]
    ledger.check_integrity()


def test_first_leases_leave_pages_for_their_companions() -> None:
    ledger = Ledger(num_pages=20, max_leases=16)
    for request in "abc":  # 6 pages each, and 3 for its companion
        ledger.ask(request, 48, companion_tokens=10)
    assert ledger.admitted == ["a", "b"]
    ledger.ask("b-draft", 24, beside="b")
    ledger.ask("plain", 16)
    assert ledger.admitted == ["a", "b", "b-draft"]  # c is first in the line
    ledger.ask("a-draft", 24, beside="a")
    assert ledger.admitted[3:] == ["a-draft"]
    ledger.check_integrity()


def test_an_empty_engine_takes_a_lease_that_leaves_no_room_for_its_companion() -> None:
    ledger = Ledger(num_pages=16)
    ledger.ask("a", 128, companion_tokens=10)
    ledger.ask("a-draft", 24, beside="a")  # waits; its caller goes on without
    assert ledger.admitted == ["a"]
    with pytest.raises(LeaseNotFound):
        ledger.ask("x-draft", 24, beside="x")


def test_withdrawing_the_head_lets_the_next_in() -> None:
    ledger = Ledger()
    ledger.ask("a", 80)
    head = ledger.ask("b", 120)
    ledger.ask("c", 24)
    ledger.withdraw(head)  # type: ignore[arg-type]
    assert ledger.admitted == ["a", "c"]
    ledger.check_integrity()


def test_a_lease_expires_when_it_is_neither_used_nor_renewed() -> None:
    ledger = Ledger()
    for lease_id in "abc":
        ledger.ask(lease_id, 24)
    ledger.hands.now = 8.0
    ledger.touch(ledger.get("a"))
    ledger.get("b").busy.add(0)  # a call in progress
    ledger.hands.now = 12.0
    assert [lease.lease_id for lease in ledger.expired()] == ["c"]


def test_choices_share_full_prompt_pages() -> None:
    ledger = Ledger()
    ledger.ask("a", 40, num_choices=3)  # 26 prompt tokens: three full pages of eight
    assert ledger.status().kv_pages_in_use == 3 + 3 * 2
    ledger.check_integrity()
    first, second, third = ledger.get("a").sequences
    assert first.table.spans(0, 24) == second.table.spans(0, 24) == third.table.spans(0, 24)
    assert first.table.spans(24, 40) != second.table.spans(24, 40)
    ledger.release("a")
    assert ledger.status().kv_pages_in_use == 0
    ledger.check_integrity()


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    ledger = Ledger()
    with pytest.raises(PromptTooLong, match="22 more than this model's context of 128"):
        ledger.ask("a", 160)
    with pytest.raises(PromptTooLong, match="the engine has 160"):
        ledger.ask("a", 120, num_choices=8, committed=((),) * 8)
    with pytest.raises(BadRequest, match="empty"):
        ledger.request(lease_request("a", as_prompt([])))
    assert ledger.status().leases_open == 0
    ledger.check_integrity()


def test_an_id_is_open_once_and_unknown_ids_are_not_found() -> None:
    ledger = Ledger()
    ledger.ask("a", 24)
    with pytest.raises(OutOfStep, match="open already"):
        ledger.ask("a", 24)
    with pytest.raises(LeaseNotFound, match="'b'"):
        ledger.get("b")
    assert ledger.release("b") is None


def test_a_lost_page_is_noticed() -> None:
    ledger = Ledger()
    ledger.ask("a", 24)
    del ledger._open["a"]
    with pytest.raises(AssertionError):
        ledger.check_integrity()


def test_companions_wait_in_the_order_they_came() -> None:
    ledger = Ledger(num_pages=20, max_leases=16)
    for request in "abc":
        ledger.ask(request, 48)
    ledger.ask("plain", 48)
    for request in "abc":
        ledger.ask(f"{request}-draft", 24, beside=request)
    ledger.release("c")
    assert ledger.admitted == ["a", "b", "c", "a-draft", "b-draft"]
    ledger.check_integrity()


def test_a_prompt_and_its_answer_may_fill_the_context_and_no_more() -> None:
    ledger = Ledger()
    with pytest.raises(PromptTooLong, match="1 more than"):
        ledger.request(lease_request("a", random_prompt(125), max_tokens=4))
    ledger.request(lease_request("a", random_prompt(124), max_tokens=4))
    assert ledger.get("a").sequences[0].capacity == 128  # no room for a longer last block
    assert ledger.status().kv_pages_in_use == 16


def test_no_more_may_be_committed_than_the_answer_may_have() -> None:
    ledger = Ledger()
    with pytest.raises(BadRequest, match="more tokens are committed"):
        ledger.ask("a", 24, committed=((5,) * 5,))
    ledger.ask("a", 24, committed=((5,) * 4,))
    assert ledger.admitted == ["a"]
