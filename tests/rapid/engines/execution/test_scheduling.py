"""Whose rows go first, and how much a prefill may cost the others: recorded times, no models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from evaluation.drivers import in_process
from rapid.engine_status import LeaseUsage
from rapid.engines.attention.batch import Feed
from rapid.engines.execution.scheduling import Scheduled, Scheduler
from rapid.engines.kv.cache import PageTable
from rapid.engines.work.base import Work

ROW_S, KEY_S = 1e-3, 1e-6
TABLE = PageTable((), 16)


class FakeLease:
    def __init__(self, tenant: str, weight: int = 1) -> None:
        terms = SimpleNamespace(tenant=tenant, weight=weight)
        self.request = SimpleNamespace(terms=terms, traceparent="")
        self.used, self.is_over = LeaseUsage(), False


class FakeWork(Work):
    """Rows that are never computed: a prefill of `num_rows`, or `num_rows` in every step."""

    def __init__(self, kind: Any, num_rows: int, tenant: str = "local", weight: int = 1) -> None:
        super().__init__(FakeLease(tenant, weight), (0,))  # type: ignore[arg-type]
        self.kind = kind
        self.num_rows = num_rows
        self.num_fed = 0

    @property
    @override
    def depth(self) -> int:
        return self.num_fed

    @override
    def feeds(self, limit: int) -> list[Feed]:
        if self.kind != "prefill":
            return [Feed([0] * self.num_rows, 0, TABLE, self.num_rows)]
        rows = min(limit, self.num_rows - self.num_fed)
        feed = Feed([0] * rows, self.num_fed, TABLE, 0)
        self.num_fed += rows
        return [feed]

    @override
    def take(self, logits: torch.Tensor) -> None:
        raise NotImplementedError


class Machine:
    """A scheduler with its clock, and the known costs of a step."""

    def __init__(
        self,
        *works: FakeWork,
        base_s: float = 0.1,
        start_s: float = 0.02,
        step_tokens: int = 64,
        slowdown: float = 2.0,
    ) -> None:
        self.now = 100.0
        self.base_s, self.start_s = base_s, start_s
        self.scheduler = Scheduler(step_tokens, slowdown, lambda: self.now)
        for work in works:
            self.scheduler.add(work)

    def step(self) -> tuple[Scheduled, float]:
        """One step, and its seconds; a prefill that is done leaves, one that rests takes a rest."""
        scheduled = self.scheduler.select()
        if not scheduled:
            rest_s = self.scheduler.rest_s + 1e-6  # a clock has its grain
            self.now += rest_s
            return [], rest_s
        feeds = [feed for work, feed in scheduled if work.kind == "prefill"]
        seconds = self.start_s if len(feeds) == len(scheduled) else self.base_s
        for feed in feeds:
            rows = len(feed.token_ids)
            seconds += rows * (ROW_S + KEY_S * (feed.position + rows / 2))
        self.now += seconds
        self.scheduler.observe(seconds, scheduled)
        self.scheduler.charge(seconds, scheduled)
        for work, _ in scheduled:
            if isinstance(work, FakeWork) and work.num_fed == work.num_rows:
                self.scheduler.drop(work)
        return scheduled, seconds


def dearest(seconds: list[float]) -> float:
    """The greatest mean of 32 in a row: time is saved up in some and spent in others."""
    num_steps = min(32, len(seconds))
    return max(
        sum(seconds[i : i + num_steps]) / num_steps for i in range(len(seconds) - num_steps + 1)
    )


def rows_of(scheduled: Scheduled) -> dict[Work, int]:
    return {work: len(feed.token_ids) for work, feed in scheduled}


def test_those_that_wait_for_a_token_go_before_a_prefill() -> None:
    verify, prefill = FakeWork("step", 11), FakeWork("prefill", 1000)
    machine = Machine(prefill, verify)
    machine.step()  # shows what it takes without
    scheduled, _ = machine.step()
    assert [work for work, _ in scheduled] == [verify, prefill]
    assert sum(rows_of(scheduled).values()) <= 64


def test_where_nobody_waits_for_a_token_a_prefill_gets_all_that_a_step_has_left() -> None:
    """An evaluation counts answers in an hour: decoding beside it costs one row, not a forward."""
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 630)
    machine = Machine(decode, prefill, base_s=0.01, slowdown=in_process.PREFILL_SLOWDOWN)
    machine.step()  # shows what it takes without,
    machine.step()  # and what a row of prefill costs
    fed = []
    while prefill.num_fed < prefill.num_rows:
        scheduled, _ = machine.step()
        assert rows_of(scheduled)[decode] == 1
        fed.append(rows_of(scheduled)[prefill])
    assert len(fed) == 10
    assert set(fed[:-1]) == {63}


@pytest.mark.parametrize("slowdown", [1.2, 2.0])
def test_beside_a_long_prefill_a_step_takes_at_most_the_stated_factor(slowdown: float) -> None:
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 8192)
    machine = Machine(decode, prefill, step_tokens=512, slowdown=slowdown)
    took = []
    while prefill.num_fed < prefill.num_rows:
        scheduled, seconds = machine.step()
        assert decode in rows_of(scheduled)
        took.append(seconds)
    # the first steps learn; a chunk of ever deeper rows is cut by what the last ones cost
    assert dearest(took[3:]) <= slowdown * machine.base_s * 1.05
    assert max(took[3:]) <= (1 + 4 * (slowdown - 1)) * machine.base_s * 1.05
    mean = sum(took) / len(took)
    assert mean - machine.base_s > (slowdown - 1) * machine.base_s * 0.7  # and uses it


@pytest.mark.parametrize("away_s", [0.001, 0.03, 0.3, 2.0])
@pytest.mark.parametrize("slowdown", [1.2, 2.0])
def test_who_comes_back_waits_for_no_more_than_the_stated_factor(
    away_s: float, slowdown: float
) -> None:
    """A caller that needs some time between two calls, beside a prefill: time per call."""
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 8192)
    machine = Machine(prefill, step_tokens=512, slowdown=slowdown)
    took = []
    machine.scheduler.add(decode)
    machine.step()
    while prefill.num_fed < prefill.num_rows:
        machine.scheduler.drop(decode)
        left_at = machine.now
        while machine.now < left_at + away_s:
            before = machine.now
            scheduled, _ = machine.step()
            if not scheduled:  # a rest ends when somebody calls
                machine.now = min(machine.now, max(left_at + away_s, before))
        machine.scheduler.add(decode)
        machine.step()
        took.append(machine.now - left_at)
    assert dearest(took[5:]) <= slowdown * (away_s + machine.base_s) * 1.05


def test_rows_too_dear_for_every_step_come_as_a_small_chunk_in_some() -> None:
    """A step with one prefill row may take nearly what one with sixteen does."""
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 8192)
    machine = Machine(decode, prefill, base_s=0.01)  # sixteen rows take 16 ms, and more later
    rows = [rows_of(machine.step()[0]).get(prefill, 0) for _ in range(30)]
    assert 0 in rows[5:]
    assert min(num_rows for num_rows in rows[5:] if num_rows) >= 16


def test_others_that_become_much_dearer_do_not_stop_a_prefill() -> None:
    """Long contexts joined: what a step took before is no measure any more."""
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 100_000)
    machine = Machine(decode, prefill, step_tokens=512)
    for _ in range(20):
        machine.step()
    machine.base_s *= 6
    for _ in range(10):
        machine.step()
    rows = [rows_of(machine.step()[0]).get(prefill, 0) for _ in range(10)]
    assert min(rows) > 100
    assert machine.scheduler.costs.base_s.value == pytest.approx(machine.base_s)


def test_what_a_step_took_too_long_the_next_makes_up_for() -> None:
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 8192)
    machine = Machine(decode, prefill, step_tokens=512)
    for _ in range(8):
        machine.step()
    scheduled = machine.scheduler.select()
    machine.scheduler.observe(2 * machine.base_s + 0.04, scheduled)
    before = rows_of(scheduled)[prefill]
    assert rows_of(machine.scheduler.select())[prefill] < before * 0.7


def test_a_prefill_alone_has_the_whole_budget() -> None:
    prefill = FakeWork("prefill", 1000)
    machine = Machine(prefill, step_tokens=512, slowdown=1.2)
    assert rows_of(machine.step()[0]) == {prefill: 512}


def test_a_prefill_that_is_left_alone_soon_has_the_whole_budget_again() -> None:
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 100_000)
    machine = Machine(decode, prefill, step_tokens=512)
    for _ in range(20):
        machine.step()
    machine.scheduler.drop(decode)
    rows = [rows_of(machine.step()[0]).get(prefill, 0) for _ in range(12)]
    assert rows == sorted(rows)
    assert rows[-1] == 512


def test_a_step_that_hung_makes_no_prefill_rest_for_long() -> None:
    """Compiling a kernel may take half a minute, once."""
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 100_000)
    machine = Machine(decode, prefill, step_tokens=512)
    machine.step()
    scheduled = machine.scheduler.select()
    assert prefill in rows_of(scheduled)
    machine.scheduler.observe(30.0, scheduled)
    machine.scheduler.drop(decode)
    rested_s = 0.0
    for _ in range(80):
        scheduled, seconds = machine.step()
        rested_s += 0.0 if scheduled else seconds
    assert rested_s <= machine.base_s * 1.01
    assert rows_of(scheduled) == {prefill: 512}


def test_some_prefill_goes_on_however_dear_it_is() -> None:
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 1000)
    machine = Machine(decode, prefill, base_s=1e-6)  # a row costs a thousand times that
    for _ in range(50):
        machine.step()
    assert 16 + 10 <= prefill.num_fed <= 16 + 13


@pytest.mark.parametrize("weight", [1, 3])
@pytest.mark.parametrize("beside", [False, True])
def test_tenants_share_the_engine_by_weight_and_then_their_leases(
    beside: bool, weight: int
) -> None:
    """By seconds: rows of the one that reads a single long prompt are deeper, and so dearer."""
    crowd = [FakeWork("prefill", 400_000, "crowd") for _ in range(3)]
    alone = FakeWork("prefill", 400_000, "alone", weight)
    machine = Machine(*crowd, alone, step_tokens=512)
    if beside:
        machine.scheduler.add(FakeWork("step", 1))
    for _ in range(20):  # until what they have on credit is spent
        machine.step()
    for work in (*crowd, alone):
        work.lease.used = LeaseUsage()
    for _ in range(960):
        machine.step()
    used = [work.lease.used.busy_s for work in crowd]
    assert alone.lease.used.busy_s == pytest.approx(weight * sum(used), rel=0.05)
    num_fed = [work.num_fed for work in crowd]
    assert num_fed == pytest.approx([sum(num_fed) / 3] * 3, rel=0.05)


def test_what_leases_used_adds_up_to_the_seconds_of_all_steps() -> None:
    prefills = [FakeWork("prefill", 500, tenant) for tenant in "abc"]
    others = [FakeWork(kind, rows, "d") for kind, rows in (("step", 11), ("draft", 1))]
    machine = Machine(*prefills, *others)
    for _ in range(60):
        machine.step()
    used = [work.lease.used.busy_s for work in (*prefills, *others)]
    assert sum(used) == pytest.approx(machine.scheduler.totals.seconds, rel=1e-9)
    assert min(used) > 0


def test_a_newcomer_waits_for_one_chunk_of_a_crowd_that_reads_without_end() -> None:
    crowd = [FakeWork("prefill", 100_000, "crowd") for _ in range(16)]
    machine = Machine(*crowd, step_tokens=512)
    for _ in range(50):
        machine.step()
    guest = FakeWork("prefill", 2_000, "guest")
    machine.scheduler.add(guest)
    before, seconds = sum(work.num_fed for work in crowd), 0.0
    while guest.num_fed < guest.num_rows:
        seconds += machine.step()[1]
    assert sum(work.num_fed for work in crowd) - before <= guest.num_rows + 512
    assert seconds <= 2.2 * guest.lease.used.busy_s


def crowded(*, guest: FakeWork, slowdown: float = 2.0) -> Machine:
    """A crowd's answers and prompts that have kept the engine busy, when a guest asks."""
    crowd = [FakeWork("step", 11, "crowd"), FakeWork("prefill", 100_000, "crowd")]
    machine = Machine(*crowd, base_s=0.03, slowdown=slowdown)
    for _ in range(20):
        machine.step()
    machine.scheduler.add(guest)
    return machine


def test_all_rest_for_the_prefill_of_one_that_asks_after_a_pause() -> None:
    guest = FakeWork("prefill", 150, "guest")
    machine = crowded(guest=guest)
    served = [set(rows_of(machine.step()[0])) for _ in range(3)]
    assert served == [{guest}] * 3
    assert guest.num_fed == guest.num_rows


@pytest.mark.parametrize("slowdown", [2.0, 4.0])
def test_others_rest_for_a_quarter_of_a_second_at_once_and_have_their_part(slowdown: float) -> None:
    guest = FakeWork("prefill", 4000, "guest", weight=100)  # whose credit lasts for all of it
    machine = crowded(guest=guest, slowdown=slowdown)
    rested_s, most_s, of_others_s, all_s = 0.0, 0.0, 0.0, 0.0
    while guest.num_fed < guest.num_rows:
        scheduled, seconds = machine.step()
        is_alone = set(rows_of(scheduled)) == {guest}
        rested_s = rested_s + seconds if is_alone else 0.0
        of_others_s += 0.0 if is_alone else machine.base_s
        most_s, all_s = max(most_s, rested_s), all_s + seconds
    assert 0.15 < most_s < 0.28
    assert of_others_s / all_s > 0.8 / slowdown


def test_small_chunks_grow_where_a_step_costs_much_and_a_row_little() -> None:
    """A chunk that is as large as the bound allows shows what a row costs; equal ones never do."""
    prefill = FakeWork("prefill", 10**6)
    scheduler = Machine(prefill, FakeWork("step", 11), step_tokens=4096, slowdown=4.0).scheduler
    sizes = []
    for _ in range(20):
        scheduled = scheduler.select()
        scheduler.observe(20e-3, scheduled)  # a row costs less than a clock sees
        sizes.append(rows_of(scheduled).get(prefill, 0))
    assert max(sizes) > 1000


def test_who_decodes_has_no_use_for_credit() -> None:
    """Its own prefill must not stall its own answers."""
    answer, prefill = FakeWork("step", 11, "guest"), FakeWork("prefill", 150, "guest")
    machine = crowded(guest=answer)
    machine.scheduler.add(prefill)
    assert answer in rows_of(machine.step()[0])


def test_leases_of_one_tenant_share_a_step() -> None:
    works = [FakeWork("prefill", 1000) for _ in range(4)]
    scheduled, _ = Machine(*works, step_tokens=512).step()
    assert rows_of(scheduled) == dict.fromkeys(works, 128)


def test_they_take_turns_when_there_is_no_room_for_all() -> None:
    works = [FakeWork("prefill", 100_000, tenant) for tenant in "aabc" for _ in range(2)]
    machine = Machine(FakeWork("step", 1), *works, base_s=1e-6)
    for _ in range(50):  # until what they have on credit is spent
        machine.step()
    for work in works:
        work.num_fed = 0
    for _ in range(1600):
        machine.step()
    of_tenants = {
        tenant: [work.num_fed for work in works if work.lease.request.terms.tenant == tenant]
        for tenant in "abc"
    }
    served = [sum(fed) for fed in of_tenants.values()]
    assert min(served) > 100
    assert max(served) - min(served) <= 32
    for fed in of_tenants.values():
        assert max(fed) - min(fed) <= 32


def test_what_a_short_prefill_leaves_goes_to_the_next() -> None:
    short, long = FakeWork("prefill", 20, "a"), FakeWork("prefill", 1000, "b")
    machine = Machine(short, long, step_tokens=512)
    assert rows_of(machine.step()[0]) == {short: 20, long: 492}


def test_drafting_ahead_takes_what_is_left_and_never_delays_a_verdict() -> None:
    ahead = [FakeWork("ahead", 1) for _ in range(3)]
    scheduler = Machine(*ahead, step_tokens=16).scheduler
    assert rows_of(scheduler.select()) == dict.fromkeys(ahead, 1)
    draft = FakeWork("draft", 14)
    scheduler.add(draft)
    assert rows_of(scheduler.select()) == {draft: 14, ahead[0]: 1, ahead[1]: 1}
    verify = FakeWork("step", 1)
    scheduler.add(verify)
    assert set(rows_of(scheduler.select())) == {draft, verify}
    scheduler.drop(draft)
    scheduler.drop(verify)
    scheduler.add(FakeWork("prefill", 1000))
    assert not set(ahead) & set(rows_of(scheduler.select()))  # the prefill takes all


def test_work_that_was_dropped_is_never_selected() -> None:
    works = [FakeWork(kind, 1) for kind in ("step", "draft", "ahead", "prefill")]
    scheduler = Machine(*works).scheduler
    for work in works:
        scheduler.drop(work)
        scheduler.drop(work)
    assert scheduler.select() == []


def test_those_that_find_no_room_in_a_step_go_first_in_the_next() -> None:
    works = [FakeWork("step", 16) for _ in range(4)]
    scheduler = Machine(*works, step_tokens=32).scheduler
    served = [list(rows_of(scheduler.select())) for _ in range(3)]
    assert served == [works[:2], works[2:], works[:2]]
