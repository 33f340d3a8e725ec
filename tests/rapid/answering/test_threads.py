"""Calls of requests in few threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rapid.answering.threads import Threads


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
    assert calls.begun.index("b0") == 3


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
