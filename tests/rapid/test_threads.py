"""Calls of requests in few threads."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from types import SimpleNamespace

import pytest

from rapid.threads import Threads, begin


class Calls:
    """Calls that wait to be let go, and count how many run at once."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.num_running = self.most_running = 0
        self._lock = threading.Lock()
        self._go = threading.Semaphore(0)

    def let_go(self, number: int = 1) -> None:
        self._go.release(number)

    def __call__(self, name: str) -> str:
        with self._lock:
            self.begun.append(name)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        self._go.acquire(timeout=30)
        with self._lock:
            self.num_running -= 1
        return name.upper()


async def begun(calls: Calls, number: int) -> None:
    async with asyncio.timeout(30):
        while len(calls.begun) < number:  # noqa: ASYNC110 (they begin in other threads)
            await asyncio.sleep(0.001)


async def test_few_calls_run_at_once_and_tenants_take_turns() -> None:
    threads, calls = Threads(2, "test"), Calls()
    names = ["a0", "a1", "a2", "a3", "b0"]
    running = [asyncio.create_task(threads.run(name[0], calls, name)) for name in names]
    await begun(calls, 2)
    for number in (3, 4, 5):
        calls.let_go()
        await begun(calls, number)
    calls.let_go(2)
    assert await asyncio.gather(*running) == ["A0", "A1", "A2", "A3", "B0"]
    assert calls.most_running == 2
    assert calls.begun.index("b0") == 2  # the others of `a` wait, who has had a call's time


async def test_a_tenant_of_three_shares_has_three_times_as_many_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Every look at this clock is a second later, so each call takes one.
    monkeypatch.setattr("rapid.threads.time", SimpleNamespace(perf_counter=count().__next__))
    threads, done = Threads(1, "test"), list[str]()
    threads.weigh("a", 3)
    await asyncio.gather(*(threads.run(name, done.append, name) for name in "b" * 9 + "a" * 9))
    assert 5 <= done[:8].count("a") <= 7

    done.clear()
    threads.weigh("a", 1)
    await asyncio.gather(*(threads.run(name, done.append, name) for name in "b" * 9 + "a" * 9))
    assert done[:8].count("a") == 4


async def test_who_leaves_before_its_call_begins_costs_nothing() -> None:
    threads, calls = Threads(1, "test"), Calls()
    running = asyncio.create_task(threads.run("a", calls, "a0"))
    await begun(calls, 1)
    crowd = [asyncio.create_task(threads.run("a", calls, f"a{n}")) for n in range(1, 9)]
    await asyncio.sleep(0)
    for each in crowd:
        each.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    calls.let_go()
    assert await running == "A0"
    calls.let_go()
    assert await threads.run("a", calls, "last") == "LAST"
    assert calls.begun == ["a0", "last"]


async def test_a_call_whose_caller_left_keeps_its_thread_until_it_returns() -> None:
    threads, calls = Threads(1, "test"), Calls()
    left = asyncio.create_task(threads.run("a", calls, "a0"))
    await begun(calls, 1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    waits = asyncio.create_task(threads.run("b", calls, "b0"))
    await asyncio.sleep(0.02)
    assert calls.begun == ["a0"]
    calls.let_go(2)
    assert await waits == "B0"
    assert calls.most_running == 1


async def test_what_a_call_raises_reaches_its_caller_and_frees_the_thread() -> None:
    threads = Threads(1, "test")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", divmod, 1, 0)


class Steps:
    """Work of several parts, each of which waits to be let go."""

    def __init__(self, calls: Calls, name: str, number: int) -> None:
        self.calls, self.name, self.left = calls, name, number

    def __call__(self) -> bool:
        self.left -= 1
        self.calls(f"{self.name}{self.left}")
        return self.left > 0


async def test_between_two_steps_other_tenants_have_turns_and_the_own_begins_nothing() -> None:
    threads, calls = Threads(1, "test"), Calls()
    first = asyncio.create_task(threads.run_steps("a", Steps(calls, "x", 3)))
    await begun(calls, 1)
    rest = [
        asyncio.create_task(threads.run_steps("a", Steps(calls, "y", 2))),
        asyncio.create_task(threads.run_steps("b", Steps(calls, "z", 2))),
    ]
    await asyncio.sleep(0)
    calls.let_go(7)
    await asyncio.gather(first, *rest)
    own = [name for name in calls.begun if name[0] in "xy"]
    assert own == ["x2", "x1", "x0", "y1", "y0"]
    assert calls.begun.index("z0") <= 4
    assert await threads.run("a", str.upper, "free") == "FREE"


async def test_steps_whose_caller_leaves_end_with_the_one_that_runs() -> None:
    threads, calls = Threads(1, "test"), Calls()
    steps = Steps(calls, "x", 3)
    left = asyncio.create_task(threads.run_steps("a", steps))
    await begun(calls, 1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    waits = asyncio.create_task(threads.run("a", calls, "next"))
    await asyncio.sleep(0)
    assert calls.begun == ["x2"]
    calls.let_go(2)
    assert await waits == "NEXT"
    assert steps.left == 2


async def test_a_step_that_fails_frees_the_thread() -> None:
    threads = Threads(1, "test")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await threads.run_steps("a", lambda: bool(1 // 0))


def test_a_call_that_has_begun_has_a_result_or_an_error():
    def fail() -> None:
        raise ValueError("no")

    assert begin(threading.current_thread).result().daemon
    with pytest.raises(ValueError, match="no"):
        begin(fail).result()
