"""Whose rows go first, and how much a prefill may cost the others: recorded times, no models."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from rapid.engines.batching import Feed
from rapid.engines.kv_cache import PageTable
from rapid.engines.scheduling import Scheduled, Scheduler
from rapid.engines.work import Work

ROW_S, KEY_S = 1e-3, 1e-6
TABLE = PageTable((), 16)


class FakeWork(Work):
    """Rows that are never computed: a prefill of `num_rows`, or `num_rows` in every step."""

    def __init__(self, kind: Any, num_rows: int, tenant: str = "local") -> None:
        lease: Any = SimpleNamespace(request=SimpleNamespace(tenant=tenant))
        super().__init__(lease, (0,))
        self.kind = kind
        self.num_rows = num_rows
        self.num_fed = 0

    @property
    @override
    def depth(self) -> int:
        return self.num_fed

    @override
    def feed(self, limit: int) -> Feed:
        if self.kind != "prefill":
            return Feed([0] * self.num_rows, 0, TABLE, self.num_rows)
        rows = min(limit, self.num_rows - self.num_fed)
        feed = Feed([0] * rows, self.num_fed, TABLE, 0)
        self.num_fed += rows
        return feed

    @override
    def take(self, logits: torch.Tensor) -> None:
        raise NotImplementedError


def scheduler(*works: FakeWork, step_tokens: int = 64, slowdown: float = 2.0) -> Scheduler:
    made = Scheduler(step_tokens, slowdown)
    for work in works:
        made.add(work)
    return made


def run_step(scheduler: Scheduler, base_s: float) -> tuple[Scheduled, float]:
    """One step on a machine with known costs; what is prefilled leaves."""
    scheduled = scheduler.select()
    feeds = [feed for work, feed in scheduled if work.kind == "prefill"]
    seconds = base_s if len(feeds) < len(scheduled) else 0.0
    for feed in feeds:
        rows = len(feed.token_ids)
        seconds += rows * (ROW_S + KEY_S * (feed.position + rows / 2))
    scheduler.observe(seconds, scheduled)
    for work, _ in scheduled:
        if isinstance(work, FakeWork) and work.num_fed == work.num_rows:
            scheduler.drop(work)
    return scheduled, seconds


def rows_of(scheduled: Scheduled) -> dict[Work, int]:
    return {work: len(feed.token_ids) for work, feed in scheduled}


def test_those_that_wait_for_a_token_go_before_a_prefill() -> None:
    verify, prefill = FakeWork("step", 11), FakeWork("prefill", 1000)
    made = scheduler(prefill, verify)
    made.costs.observe(1.0, [], is_mixed=False)
    scheduled = made.select()
    assert [work for work, _ in scheduled] == [verify, prefill]
    assert sum(rows_of(scheduled).values()) <= 64


@pytest.mark.parametrize("slowdown", [1.2, 2.0])
def test_beside_a_long_prefill_a_step_takes_at_most_the_stated_factor(slowdown: float) -> None:
    base_s = 0.1
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 8192)
    made = scheduler(decode, prefill, step_tokens=512, slowdown=slowdown)
    took = []
    for _ in range(10_000):
        scheduled, seconds = run_step(made, base_s)
        assert decode in rows_of(scheduled)
        took.append(seconds)
        if prefill.num_fed == prefill.num_rows:
            break
    assert prefill.num_fed == prefill.num_rows
    # the first steps learn; a chunk of ever deeper rows is cut by what the last one's cost
    assert max(took[3:]) <= slowdown * base_s * 1.02
    prefilling = [seconds for seconds in took if seconds > base_s]
    assert sum(prefilling) / len(prefilling) > slowdown * base_s * 0.9  # and makes use of it


def test_a_prefill_alone_has_the_whole_budget() -> None:
    prefill = FakeWork("prefill", 1000)
    made = scheduler(prefill, step_tokens=512, slowdown=1.2)
    made.costs.observe(1e-9, [], is_mixed=False)
    assert rows_of(made.select()) == {prefill: 512}


def test_some_prefill_goes_on_however_dear_it_is() -> None:
    decode, prefill = FakeWork("step", 1), FakeWork("prefill", 1000)
    made = scheduler(decode, prefill)
    for _ in range(50):
        run_step(made, base_s=1e-6)  # a row costs a thousand times that
    assert 16 + 40 <= prefill.num_fed <= 16 + 50


@pytest.mark.parametrize("beside", [False, True])
def test_tenants_share_equally_and_then_their_leases(beside: bool) -> None:
    crowd = [FakeWork("prefill", 100_000, "crowd") for _ in range(3)]
    alone = FakeWork("prefill", 100_000, "alone")
    made = scheduler(*crowd, alone, step_tokens=512)
    if beside:
        made.add(FakeWork("step", 1))
    for _ in range(240):
        run_step(made, base_s=0.05)
    assert alone.num_fed == pytest.approx(sum(work.num_fed for work in crowd), rel=0.05)
    for work in crowd:
        assert work.num_fed == pytest.approx(alone.num_fed / 3, rel=0.05)


def test_they_take_turns_when_there_is_no_room_for_all() -> None:
    works = [FakeWork("prefill", 100_000, tenant) for tenant in "aabc" for _ in range(2)]
    made = scheduler(FakeWork("step", 1), *works)
    served: Counter[str] = Counter()
    for _ in range(400):
        for work, feed in run_step(made, base_s=1e-6)[0]:
            if work.kind == "prefill":
                served[work.lease.request.tenant] += len(feed.token_ids)
    assert max(served.values()) - min(served.values()) <= 32
    for tenant in "abc":
        fed = [work.num_fed for work in works if work.lease.request.tenant == tenant]
        assert max(fed) - min(fed) <= 32, tenant


def test_what_a_short_prefill_leaves_goes_to_the_next() -> None:
    short, long = FakeWork("prefill", 20, "a"), FakeWork("prefill", 1000, "b")
    made = scheduler(short, long, step_tokens=512)
    assert rows_of(made.select()) == {short: 20, long: 492}


def test_drafting_ahead_takes_what_is_left_and_never_delays_a_verdict() -> None:
    ahead = [FakeWork("ahead", 1) for _ in range(3)]
    made = scheduler(*ahead, step_tokens=16)
    assert rows_of(made.select()) == dict.fromkeys(ahead, 1)
    draft = FakeWork("draft", 14)
    made.add(draft)
    assert rows_of(made.select()) == {draft: 14, ahead[0]: 1, ahead[1]: 1}
    verify = FakeWork("step", 1)
    made.add(verify)
    assert set(rows_of(made.select())) == {draft, verify}
    made.drop(draft)
    made.drop(verify)
    made.add(FakeWork("prefill", 1000))
    assert not set(ahead) & set(rows_of(made.select()))  # the prefill takes all


def test_work_that_was_dropped_is_never_selected() -> None:
    works = [FakeWork(kind, 1) for kind in ("step", "draft", "ahead", "prefill")]
    made = scheduler(*works)
    for work in works:
        made.drop(work)
        made.drop(work)
    assert made.select() == []
