"""The ledger on a clock that is set by hand: room, queue, expiry."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rapid.engines.kv.cache import PagePool, PageRun
from rapid.engines.kv.leases.lease import Lease
from rapid.engines.kv.leases.lease_ledger import LeaseLedger
from rapid.engines.kv.leases.lines import Waiter
from rapid.engines.kv.rings import Ring, RingPool
from rapid.errors import BadRequest, LeaseNotFound, OutOfStep, PromptTooLong
from rapid.messages import LeaseRequest, as_prompt
from rapid.planning.ring_sizes import RingPlan
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

    def _remember(self, opened: Lease | Exception) -> None:
        self.admitted.append(opened.lease_id if isinstance(opened, Lease) else repr(opened))


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


def test_a_crowd_of_one_tenant_delays_another_by_one_lease() -> None:
    ledger = Ledger(max_leases=1)
    for number in range(5):
        ledger.ask(f"crowd-{number}", 24, tenant="crowd")
    for number in range(2):
        ledger.ask(f"guest-{number}", 24, tenant="guest")
    for _ in range(6):
        ledger.release(ledger.admitted[-1])
        ledger.check_integrity()
    assert ledger.admitted == [
        "crowd-0", "crowd-1", "guest-0", "crowd-2", "guest-1", "crowd-3", "crowd-4",
    ]  # fmt: skip


def test_who_comes_back_at_once_does_not_come_before_those_who_wait() -> None:
    """A tenant that asks one thing after another has no more turns than one that asks at once."""
    ledger = Ledger(max_leases=1)
    for lease_id in ("a0", "a1", "b0", "a2"):
        ledger.ask(lease_id, 24, tenant=lease_id[0])
    for number in range(1, 4):
        ledger.release(ledger.admitted[-1])
        ledger.release(ledger.admitted[-1])
        ledger.ask(f"b{number}", 24, tenant="b")
    assert ledger.admitted[:5] == ["a0", "a1", "b0", "a2", "b1"]
    ledger.check_integrity()


def test_a_tenant_that_holds_less_comes_before_one_that_holds_more() -> None:
    """However much the one asks for, and however many leases of it wait."""
    ledger = Ledger(num_pages=20, max_leases=16)
    ledger.ask("crowd-0", 96, tenant="crowd")  # 12 pages
    for number in range(1, 5):
        ledger.ask(f"crowd-{number}", 96, tenant="crowd")
    for number in range(9):  # one short question after another, of 3 pages each
        ledger.ask(f"guest-{number}", 24, tenant="guest")
        assert ledger.admitted[-1] == f"guest-{number}"
        ledger.check_integrity()
        if number:
            ledger.release(f"guest-{number - 1}")
    ledger.release("crowd-0")
    assert ledger.admitted[-1] == "crowd-1"


def test_shared_pages_are_held_once() -> None:
    """Four questions about one document hold 23 pages, and not 56; two others hold 32."""
    ledger = Ledger(num_pages=80, max_leases=6)
    asked = lease_request("reader-0", random_prompt(96, seed=1), max_tokens=4, tenant="reader")
    for number in range(4):
        ledger.request(replace(asked, lease_id=f"reader-{number}"))
    for number in range(3):
        ledger.ask(f"writer-{number}", 128, tenant="writer")
    ledger.request(replace(asked, lease_id="reader-4"))
    ledger.release("reader-0")
    assert ledger.admitted[-1] == "reader-4"


def test_who_asked_of_late_finds_a_place_beside_a_crowd() -> None:
    ledger = Ledger(num_pages=200, max_leases=16)
    for number in range(20):
        ledger.ask(f"crowd-{number}", 24, tenant="crowd")
    assert len(ledger.admitted) == 16  # a tenant that is alone may have all
    ledger.ask("guest-0", 24, tenant="guest")
    ledger.release("crowd-0")
    assert ledger.admitted[-1] == "guest-0"
    ledger.release("guest-0")
    for number in range(1, 4):  # two places are kept from now on
        ledger.release(f"crowd-{number}")
    assert len(ledger.admitted) == 19
    ledger.ask("guest-1", 24, tenant="guest")
    assert ledger.admitted[-2:] == ["guest-1", "crowd-18"]  # for whom no place is kept any more
    ledger.check_integrity()
    for number in range(256):  # the guest has not asked for long
        ledger.withdraw(ledger.ask(f"more-{number}", 24, tenant="crowd"))
    ledger.release("guest-1")
    assert ledger.admitted[-1] == "crowd-19"
    ledger.check_integrity()


def test_a_large_lease_is_overtaken_a_few_times_and_then_no_more() -> None:
    ledger = Ledger(num_pages=20, max_leases=16)
    for number in range(6):  # 3 pages each
        ledger.ask(f"small-{number}", 24, tenant=f"t{number}")
    ledger.ask("large", 128, tenant="large")  # 16 pages
    for number in range(6, 30):  # as soon as one is answered another comes
        ledger.ask(f"small-{number}", 24, tenant=f"t{number}")
        if number - 6 < len(ledger.admitted):
            ledger.release(f"small-{number - 6}")
        ledger.check_integrity()
    overtaken = ledger.admitted.index("large") - 6
    assert overtaken == 8


def test_what_is_due_does_not_keep_back_who_holds_less() -> None:
    """A lease that waits for its own tenant's to end would wait as long if the others waited."""
    ledger = Ledger(num_pages=20, max_leases=16)
    ledger.ask("crowd-0", 96, tenant="crowd")  # 12 pages
    due = ledger.ask("crowd-1", 96, tenant="crowd")
    due.num_overtaken = 8
    ledger.ask("guest-0", 24, tenant="guest")
    assert ledger.admitted == ["crowd-0", "guest-0"]
    ledger.ask("equal", 24, tenant="crowd")
    ledger.release("crowd-0")
    assert ledger.admitted[2:] == ["crowd-1", "equal"]
    due = ledger.ask("large-0", 128, tenant="large")  # its tenant holds nothing: it keeps all back
    due.num_overtaken = 8
    ledger.ask("new-0", 16, tenant="new")
    assert len(ledger.admitted) == 4
    ledger.check_integrity()


def test_a_question_about_a_document_that_is_here_overtakes_one_that_must_be_read() -> None:
    ledger = Ledger(num_pages=20, max_leases=16)
    document = random_prompt(96, seed=1)
    ask = lease_request("reader-0", document, max_tokens=4, tenant="reader")  # 14 pages
    ledger.request(ask)
    ledger.ask("other", 64, tenant="other")  # 8 pages, of which 6 are free
    ledger.request(replace(ask, lease_id="reader-1"))
    assert ledger.admitted == ["reader-0", "reader-1"]
    ledger.check_integrity()


def test_only_requests_with_the_same_salt_share_pages() -> None:
    ledger = Ledger(num_pages=40)
    document = random_prompt(96, seed=1)
    asked = lease_request("a", document, max_tokens=4, cache_salt="mine")
    ledger.request(asked)
    alone = ledger.status().kv_pages_in_use
    ledger.request(replace(asked, lease_id="b"))
    shared = ledger.status().kv_pages_in_use - alone
    ledger.request(lease_request("c", document, max_tokens=4))
    assert ledger.status().kv_pages_in_use - alone - shared == alone
    assert shared < 4


def test_a_tenant_that_stops_waiting_leaves_its_turn_to_the_next() -> None:
    ledger = Ledger(max_leases=1)
    ledger.ask("a", 24)
    impatient = ledger.ask("b", 24, tenant="impatient")
    ledger.ask("c", 24, tenant="patient")
    assert ledger.withdraw(impatient)
    assert not ledger.withdraw(impatient)
    ledger.check_integrity()
    ledger.release("a")
    assert ledger.admitted == ["a", "c"]


def test_no_lease_opens_out_of_order_and_every_lease_opens() -> None:
    """A walk of arrivals, ends and withdrawals, of leases of every size."""
    walk = random.Random(3)
    ledger = Ledger(num_pages=40, max_leases=6)
    waiting: dict[str, Waiter] = {}
    held: Counter[str] = Counter()
    num_passed = 0
    for number in range(4_000):
        before = len(ledger.admitted)
        # Who holds nothing and is due, of the tenants that wait.
        due = {
            head.request.terms.tenant: head.number
            for head in ledger._lines.heads()
            if head.is_due and not held[head.request.terms.tenant]
        }
        step = walk.random()
        if step < 0.5 and len(waiting) < 20:
            tenant = walk.choice("aaaabbc")  # some ask more often than others
            lease_id = f"{tenant}{number}"
            waiting[lease_id] = ledger.ask(lease_id, walk.randint(15, 128), tenant=tenant)
        elif step < 0.55 and waiting:
            lease_id = walk.choice(list(waiting))
            assert ledger.withdraw(waiting.pop(lease_id))
            due.pop(lease_id[0], None)
        elif open_leases := ledger.leases():
            lease_id = walk.choice(open_leases).lease_id
            held[lease_id[0]] -= 1
            ledger.release(lease_id)
        ledger.check_integrity()
        for lease_id in ledger.admitted[before:]:
            opened = waiting.pop(lease_id)
            held[lease_id[0]] += 1
            earlier = [n for tenant, n in due.items() if tenant != lease_id[0]]
            assert all(opened.number < n for n in earlier), "a later one opened before who is due"
            due.pop(lease_id[0], None)
            own = [
                each.number for each in waiting.values() if each.request.terms.tenant == lease_id[0]
            ]
            assert all(opened.number < n for n in own), "a tenant's own leases change places"
            num_passed += any(each.number < opened.number for each in waiting.values())
    assert len(ledger.admitted) > 500
    assert num_passed > 50
    while open_leases := ledger.leases():
        ledger.release(open_leases[0].lease_id)
    assert set(waiting) <= set(ledger.admitted)
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


def test_the_room_for_a_companion_that_will_not_come_is_given_back() -> None:
    """Of four places, two requests keep two each until it is known that nothing will draft."""
    ledger = Ledger()
    for request in "abcd":
        ledger.ask(request, 24, companion_tokens=10)
    assert ledger.admitted == ["a", "b"]
    ledger.forgo_companion("a")  # one place is not enough for c and its companion
    assert ledger.admitted == ["a", "b"]
    ledger.forgo_companion("b")
    assert ledger.admitted == ["a", "b", "c"]
    ledger.forgo_companion("c")
    ledger.forgo_companion("gone")
    assert ledger.admitted == ["a", "b", "c"]  # d could not draft, and asks to
    ledger.check_integrity()
    ledger.release("a")
    assert ledger.admitted == ["a", "b", "c", "d"]
    ledger.check_integrity()


def test_a_companion_that_another_follows_leaves_it_its_room() -> None:
    """The drafter is asked one word on a lease of its own, before the one on which it drafts."""
    ledger = Ledger(max_leases=2)
    ledger.ask("a", 24, companion_tokens=10)
    ledger.ask("plain", 24)
    ledger.ask("a-word", 24, beside="a", companion_tokens=10)
    ledger.release("a-word")
    assert ledger.admitted == ["a", "a-word"]
    ledger.ask("a-draft", 24, beside="a")
    assert ledger.admitted == ["a", "a-word", "a-draft"]
    ledger.check_integrity()
    ledger.release("a-draft")
    assert ledger.admitted[3:] == ["plain"]


def test_a_companion_that_has_ended_leaves_its_room_to_others() -> None:
    ledger = Ledger(max_leases=3)
    ledger.ask("a", 24, companion_tokens=10)
    ledger.ask("a-draft", 24, beside="a")
    ledger.release("a-draft")
    for request in "bc":
        ledger.ask(request, 24)
    assert ledger.admitted == ["a", "a-draft", "b", "c"]
    ledger.check_integrity()


def test_an_empty_engine_takes_a_lease_that_leaves_no_room_for_its_companion() -> None:
    ledger = Ledger(num_pages=16)
    ledger.ask("a", 128, companion_tokens=10)
    with pytest.raises(PromptTooLong, match=r"24 tokens .* the 128 .* has 128 \(kv_cache_tokens"):
        ledger.ask("a-draft", 24, beside="a")  # it would wait for ever
    assert ledger.admitted == ["a"]
    ledger.check_integrity()
    with pytest.raises(LeaseNotFound):
        ledger.ask("x-draft", 24, beside="x")


def test_a_companion_that_shares_its_beginning_needs_that_much_less() -> None:
    ledger = Ledger(num_pages=17)
    whole = random_prompt(106)
    ledger.request(lease_request("a", whole, max_tokens=4))
    longer = lease_request("a-long", whole[:50], max_tokens=4, beside="a")
    ledger.request(longer)
    assert ledger.admitted == ["a", "a-long"]
    other = np.concatenate([whole[:40], whole[41:51]])
    with pytest.raises(PromptTooLong, match="needs 24 tokens of KV beside the 120"):
        ledger.request(replace(longer, lease_id="a-other", prompt_ids=other))
    ledger.check_integrity()


def test_an_engine_of_one_lease_takes_no_companion() -> None:
    ledger = Ledger(max_leases=1)
    ledger.ask("a", 24, companion_tokens=10)
    with pytest.raises(PromptTooLong, match="max_leases"):
        ledger.ask("a-draft", 24, beside="a")


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
    assert [lease.lease_id for lease in ledger.find_expired()] == ["c"]


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
    with pytest.raises(
        PromptTooLong,
        match=r"^This model.s maximum context length is 128 tokens\..*22 more than this",
    ):
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


def test_the_status_tells_what_waits_and_what_is_kept() -> None:
    ledger = Ledger(num_pages=20)
    ledger.ask("open", 41, companion_tokens=10)
    status = ledger.status()
    assert (status.leases_kept, status.kv_pages_kept) == (1, 3)
    assert (status.leases_waiting, status.tokens_waiting) == (0, 3 * 8)
    ledger.prefixes.note_computed(ledger.get("open").prompt_pages[:2])
    assert ledger.status().tokens_waiting == 8
    for name in ("one", "two"):  # two questions about one document
        asked = lease_request(name, random_prompt(100, 7), max_tokens=4)
        ledger.request(replace(asked, affinity="document"))
    ledger.ask("third", 100)
    status = ledger.status()
    assert status.leases_waiting == 3
    assert status.tokens_waiting == 8 + 100 + (100 - 4 - 10)
    ledger.forgo_companion("open")
    assert (ledger.status().leases_kept, ledger.status().kv_pages_kept) == (0, 0)


def test_what_two_prompts_share_is_read_once() -> None:
    ledger = Ledger(num_pages=20)
    prompt = random_prompt(33, 7)
    for name in ("one", "two"):
        ledger.request(lease_request(name, prompt, max_tokens=4))
    assert ledger.status().leases_open == 2
    assert ledger.status().tokens_waiting == 4 * 8


class Breaking(RingPool):
    """Rings, one of which cannot be had: the `fails_at`-th that is taken, counted from 0."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(RingPlan(24, 8, 32, num_rings=8, num_kept=2))
        self.fails_at, self.num_taken = fails_at, 0

    def take(self) -> Ring:
        self.num_taken += 1
        if self.num_taken - 1 == self.fails_at:
            raise TypeError("broken")
        return super().take()


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_lease_that_cannot_be_opened_is_told_and_nobody_else_suffers(num_choices: int) -> None:
    """It fails in its own call, with all it had taken given back, and those behind it open."""
    ledger = Ledger()
    ledger.rings = Breaking(fails_at=num_choices - 1)
    ledger.ask("bad", 40, num_choices=num_choices)
    assert ledger.admitted == ["TypeError('broken')"]
    assert ledger.status().kv_pages_in_use == 0
    ledger.check_integrity()
    ledger.ask("good", 40)
    assert ledger.admitted[1:] == ["good"]


def test_a_lease_that_fails_after_it_has_waited_does_not_fail_who_made_room() -> None:
    ledger = Ledger()
    ledger.rings = Breaking(fails_at=1)
    ledger.ask("a", 120)
    ledger.ask("bad", 80)
    ledger.ask("good", 80)
    ledger.release("a")
    assert ledger.admitted == ["a", "TypeError('broken')", "good"]
    ledger.check_integrity()


def test_a_prompt_that_gets_no_pages_gives_back_those_it_shared(monkeypatch) -> None:
    ledger = Ledger()
    prompt = random_prompt(40)
    ledger.request(lease_request("a", prompt, max_tokens=4))

    def breaks(num_pages: int) -> tuple[PageRun, ...]:
        raise TypeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(ledger.pool, "allocate", breaks)
        ledger.request(lease_request("bad", prompt, max_tokens=4))
    assert ledger.admitted == ["a", "TypeError('broken')"]
    ledger.check_integrity()


def test_who_waits_when_the_engine_closes_is_told_why() -> None:
    ledger = Ledger()
    ledger.ask("a", 120)
    ledger.ask("b", 120)
    ledger.close()
    assert ledger.admitted == ["a", "EngineFailed('the engine is closed')"]
