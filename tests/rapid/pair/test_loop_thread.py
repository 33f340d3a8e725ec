"""The loop behind callers that block: what its end does to what is left on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rapid.errors import RapidError
from rapid.pair.loop_thread import LoopThread


async def _one() -> int:
    return 1


def test_work_runs_on_the_loop_until_it_ends() -> None:
    with LoopThread() as loop:
        assert loop.run(_one) == 1
    with pytest.raises(RapidError, match="this pair is closed"):
        loop.run(_one)


def test_who_waits_when_the_loop_ends_is_told() -> None:
    has_begun = threading.Event()

    async def never() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor() as threads:
        with LoopThread() as loop:
            waiting = threads.submit(loop.run, never)
            assert has_begun.wait(60)
        with pytest.raises(RapidError, match="this pair is closed"):
            waiting.result()


def test_a_generator_that_was_left_open_is_closed_on_the_loop() -> None:
    closed_by = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            closed_by.append(threading.current_thread().name)

    taken = numbers()
    with LoopThread() as loop:
        assert loop.run(lambda: anext(taken)) == 1
    assert closed_by == ["rapid-pair"]
