"""Lines of tenants before a few places."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from rapid.fair_queue import FairQueue, Refusal


class Crowd:
    """Tasks that write down when they get a place and keep it until told."""

    def __init__(self, turns: FairQueue) -> None:
        self.turns = turns
        self.entered: list[str] = []
        self.inside: list[asyncio.Event] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, is_first: bool = False) -> None:
        """The tenant of a task is the first letter of its name."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._stay(name, is_first))
            await settled()

    async def let_out(self) -> None:
        self.inside.pop(0).set()
        await settled()

    async def _stay(self, name: str, is_first: bool) -> None:
        async with self.turns.turn(name[0], is_first=is_first):
            self.entered.append(name)
            done = asyncio.Event()
            self.inside.append(done)
            await done.wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_and_a_tenants_own_tasks_keep_their_order() -> None:
    crowd = Crowd(FairQueue(1))
    await crowd.come("a0", "a1", "a2", "a3", "b0", "b1", "c0")
    for _ in range(6):
        await crowd.let_out()
    assert crowd.entered == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_a_tenant_that_comes_back_at_once_has_no_more_turns_than_others() -> None:
    crowd = Crowd(FairQueue(1))
    await crowd.come("a0", "a1", "b0", "a2")
    await crowd.let_out()
    await crowd.let_out()
    await crowd.come("b1")
    await crowd.let_out()
    assert crowd.entered == ["a0", "a1", "b0", "a2"]


async def test_who_was_charged_the_least_work_is_next_by_weight() -> None:
    queue = FairQueue(1)
    crowd = Crowd(queue)
    await crowd.come("a0", "a1", "a2", "b0", "b1", "b2", "c0")
    for _ in range(6):
        queue.charge("a", 3.0)
        queue.charge("b", 1.0)
        await crowd.let_out()
    assert crowd.entered == ["a0", "c0", "b0", "b1", "b2", "a1", "a2"]


async def test_who_continues_stands_at_the_head_of_its_own_line_only() -> None:
    crowd = Crowd(FairQueue(1))
    await crowd.come("a0", "b0", "a1")
    await crowd.come("a2", is_first=True)
    for _ in range(3):
        await crowd.let_out()
    assert crowd.entered == ["a0", "b0", "a2", "a1"]


async def test_who_leaves_the_line_is_passed_over() -> None:
    crowd = Crowd(FairQueue(1))
    await crowd.come("a0", "b0", "c0")
    crowd.tasks["b0"].cancel()
    await settled()
    assert crowd.turns.num_waiting == 1
    await crowd.let_out()
    assert crowd.entered == ["a0", "c0"]


@pytest.mark.parametrize("is_cancelled_first", [True, False])
async def test_a_place_that_comes_in_the_moment_of_leaving_is_not_lost(
    is_cancelled_first: bool,
) -> None:
    crowd = Crowd(FairQueue(1))
    await crowd.come("a0", "b0", "c0")
    if is_cancelled_first:
        crowd.tasks["b0"].cancel()
    crowd.turns.leave()
    if not is_cancelled_first:
        crowd.tasks["b0"].cancel()
    await settled()
    assert crowd.entered == ["a0", "c0"]


@pytest.mark.parametrize(
    ("waiting", "tenant", "refusal"),
    [
        ("", "a", None),
        ("aaaa", "a", "tenant"),  # half of the room is its own
        ("aaaa", "b", None),
        ("aaaabb", "b", "tenant"),
        ("aaaabb", "c", None),
        ("aaaabbc", "c", "tenant"),
        ("aaaabbc", "d", None),
        ("aaaabbcd", "e", "all"),
        ("aaaabbcd", "d", "tenant"),
    ],
)
async def test_a_line_is_as_long_as_there_is_room_for_others(
    waiting: str, tenant: str, refusal: Refusal | None
) -> None:
    crowd = Crowd(FairQueue(1, max_waiting=8))
    await crowd.come("x", *(f"{each}{number}" for number, each in enumerate(waiting)))
    assert crowd.turns.refusal(tenant) == refusal
    for task in crowd.tasks.values():
        task.cancel()


async def test_a_smaller_priority_is_sooner_among_its_tenants_own_only() -> None:
    turns = FairQueue(1)
    entered: list[str] = []

    async def stay(name: str, priority: int, is_first: bool = False) -> None:
        async with turns.turn(name[0], is_first=is_first, priority=priority):
            entered.append(name)

    await turns.enter("a")
    coming = [("a0", 0), ("a1", 5), ("a2", -1), ("b0", 9), ("b1", 9), ("a3", 0), ("b2", 3)]
    tasks = [asyncio.create_task(stay(*each)) for each in coming]
    tasks.append(asyncio.create_task(stay("a4", 7, is_first=True)))
    await settled()
    turns.leave()
    await asyncio.gather(*tasks)
    assert [name for name in entered if name[0] == "a"] == ["a4", "a2", "a0", "a3", "a1"]
    assert [name for name in entered if name[0] == "b"] == ["b2", "b0", "b1"]
    assert [name[0] for name in entered] == [*"abababaa"]


async def test_while_a_place_is_free_nobody_is_refused() -> None:
    turns = FairQueue(2, max_waiting=1)
    await turns.enter("a")
    assert turns.refusal("a") is None
    assert FairQueue(1).refusal("a") is None


async def test_no_place_is_lost_or_given_twice_in_a_walk_of_arrivals_and_departures() -> None:
    walk = random.Random(5)
    turns = FairQueue(3)
    crowd = Crowd(turns)
    for number in range(2_000):
        step = walk.random()
        if step < 0.5:
            await crowd.come(f"{walk.choice('aaab')}{number}")
        elif step < 0.7 and crowd.tasks:
            name = walk.choice(list(crowd.tasks))
            if name not in crowd.entered:
                crowd.tasks[name].cancel()
        elif crowd.inside:
            crowd.inside.pop(0).set()
        num_inside = len(crowd.inside)
        assert num_inside <= 3
        if step < 0.5:
            assert num_inside == 3 or turns.num_waiting == 0
    while crowd.inside:
        await crowd.let_out()
    assert turns.num_waiting == 0
    assert Counter(name[0] for name in crowd.entered)["b"] > 100
