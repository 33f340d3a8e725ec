"""Replies that a thread settles while an event loop awaits them."""

from __future__ import annotations

import asyncio
from threading import Thread

import pytest

from rapid.engines.execution.replies import Reply


def settle_elsewhere(reply: Reply, *args: object, **kwargs: object) -> None:
    thread = Thread(target=reply.settle, args=args, kwargs=kwargs)
    thread.start()
    thread.join()


async def test_a_thread_settles_what_a_loop_awaits() -> None:
    reply = Reply()
    settle_elsewhere(reply, 5)
    assert await reply.future == 5
    failed = Reply()
    settle_elsewhere(failed, error=KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        await failed.future


async def test_only_the_first_of_two_counts_and_none_after_its_caller_left() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    reply, abandoned = Reply(), Reply()
    settle_elsewhere(reply, "first")
    settle_elsewhere(reply, error=KeyError("second"))
    abandoned.future.cancel()
    settle_elsewhere(abandoned, "late")
    await asyncio.sleep(0)
    assert await reply.future == "first"
    assert abandoned.future.cancelled()
    assert complaints == []


def test_a_loop_that_has_closed_misses_nothing() -> None:
    async def make() -> Reply:
        return Reply()

    settled = asyncio.run(make())
    settled.settle("late")
    assert not settled.future.done()
