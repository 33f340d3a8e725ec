"""The engine's end of calls that travel together: each ends by itself, some at the same moment."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from deployments.pools.shared_calls import MOST_BYTES, Asked, EndedCall, Mailboxes
from rapid.errors import EngineFailed, LeaseNotFound


class Block(str):
    """Stands for a draft block of so many bytes."""

    def __new__(cls, name: str, num_bytes: int = 100) -> Block:
        block = super().__new__(cls, name)
        block.candidate_ids = block.candidate_probs = np.zeros(num_bytes // 2, np.int8)
        return block


class SteppingEngine:
    """Its calls end when a test says so, all of one step in the same moment."""

    def __init__(self) -> None:
        self.pending: dict[str, asyncio.Future[Any]] = {}
        self.blocks: list[Any] = []

    def end(self, **ends: object) -> None:
        for lease_id, end in ends.items():
            pending = self.pending.pop(lease_id)
            if isinstance(end, Exception):
                pending.set_exception(end)
            else:
                pending.set_result(Block(end) if type(end) is str else end)

    async def draft(self, lease_id: str, *_: object) -> object:
        self.pending[lease_id] = asyncio.get_running_loop().create_future()
        return await self.pending[lease_id]

    decode = draft

    async def verify(self, lease_id: str, choice: int, block: object, *also: object) -> object:
        self.blocks.append((choice, block, *also))
        return await self.draft(lease_id)


@pytest.fixture
def engine() -> SteppingEngine:
    return SteppingEngine()


@pytest.fixture
def boxes(engine: SteppingEngine) -> Mailboxes:
    return Mailboxes(engine)


def decoding(ticket: int, lease_id: str) -> Asked:
    return Asked(ticket, "decode", (lease_id, 0, 4))


async def begun(boxes: Mailboxes, *calls: Asked, caller: str = "me") -> asyncio.Task[Any]:
    exchange = asyncio.create_task(boxes.exchange(caller, calls, ()))
    for _ in range(3):
        await asyncio.sleep(0)
    return exchange


async def ends(exchange: asyncio.Task[Any]) -> list[EndedCall]:
    async with asyncio.timeout(5):
        ended: list[EndedCall] = (await exchange)[0]
        return ended


async def test_a_late_call_holds_up_no_other(engine: SteppingEngine, boxes: Mailboxes) -> None:
    exchange = await begun(boxes, decoding(1, "a"), decoding(2, "late"), decoding(3, "c"))
    engine.end(a="A", c="C")
    assert await ends(exchange) == [EndedCall(1, "A"), EndedCall(3, "C")]
    rest = await begun(boxes)
    assert not rest.done()
    engine.end(late="B")
    assert await ends(rest) == [EndedCall(2, "B")]


async def test_what_one_step_ends_comes_back_together_whatever_it_came_with(
    engine: SteppingEngine, boxes: Mailboxes
) -> None:
    first = await begun(boxes, decoding(1, "a"), decoding(2, "b"))
    other = await begun(boxes, decoding(3, "c"))
    engine.end(b="B", c="C")
    done, waiting = await asyncio.wait({first, other}, return_when=asyncio.FIRST_COMPLETED)
    assert await ends(done.pop()) == [EndedCall(2, "B"), EndedCall(3, "C")]
    engine.end(a="A")
    assert await ends(waiting.pop()) == [EndedCall(1, "A")]


async def test_an_exchange_too_many_comes_back_at_once(
    engine: SteppingEngine, boxes: Mailboxes
) -> None:
    """Otherwise those that wait would become more and more."""
    exchanges = [await begun(boxes, decoding(n, lease_id)) for n, lease_id in enumerate("abc")]
    engine.end(a="A", b="B")
    found = [await ends(each) for each in (exchanges[0], exchanges[1])]
    assert found == [[EndedCall(0, "A"), EndedCall(1, "B")], []]
    assert not exchanges[2].done()
    engine.end(c="C")
    assert await ends(exchanges[2]) == [EndedCall(2, "C")]


async def test_an_error_is_of_its_call_alone(engine: SteppingEngine, boxes: Mailboxes) -> None:
    exchange = await begun(boxes, *(decoding(n, lease_id) for n, lease_id in enumerate("abc")))
    gone = LeaseNotFound("no lease b")
    engine.end(a="A", b=gone, c=ValueError("a bug, with text of a prompt"))
    fine, failed, broken = await ends(exchange)
    assert fine == EndedCall(0, "A")
    assert failed == EndedCall(1, None, gone)
    assert isinstance(broken.error, EngineFailed)
    assert "prompt" not in str(broken.error)


async def test_drafted_blocks_travel_beside_the_answer_and_into_the_call_that_judges_them(
    engine: SteppingEngine, boxes: Mailboxes
) -> None:
    drafting = (Asked(n, "draft", (lease_id, 0, None, 4)) for n, lease_id in enumerate("abc"))
    exchange = await begun(boxes, *drafting)
    engine.end(a="block a", b=LeaseNotFound("gone"), c="block c")
    ended, blocks = await exchange
    assert [call.place for call in ended] == [0, None, 1]
    assert blocks == ["block a", "block c"]
    judging = (Asked(7, "verify", ("t", 2, "witness"), place=1),)
    judged = asyncio.create_task(boxes.exchange("me", judging, blocks))
    await asyncio.sleep(0.01)
    assert engine.blocks == [(2, "block c", "witness")]
    engine.end(t="verdict")
    assert await ends(judged) == [EndedCall(7, "verdict")]


async def test_blocks_that_are_too_many_for_one_message_come_one_after_the_other(
    engine: SteppingEngine, boxes: Mailboxes
) -> None:
    drafting = (Asked(n, "draft", (lease_id, 0, None, 4)) for n, lease_id in enumerate("abcd"))
    exchange = await begun(boxes, *drafting)
    half = MOST_BYTES // 2
    engine.end(a=Block("a", half), b=Block("b", half), c=Block("c", 3 * half), d=Block("d", half))
    found = [(await exchange)[1], (await boxes.exchange("me", (), ()))[1]]
    found.append((await boxes.exchange("me", (), ()))[1])
    assert found == [["a", "b"], ["c"], ["d"]]
    assert boxes._boxes == {}


async def test_callers_get_their_own_and_the_dead_are_forgotten(
    engine: SteppingEngine, boxes: Mailboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges = {
        caller: await begun(
            boxes, decoding(1, f"{caller}1"), decoding(2, f"{caller}2"), caller=caller
        )
        for caller in ("dead", "live")
    }
    engine.end(live1=1, live2=2, dead1=3)
    assert await ends(exchanges["live"]) == [EndedCall(1, 1), EndedCall(2, 2)]
    assert await ends(exchanges["dead"]) == [EndedCall(1, 3)]
    engine.end(dead2=4)  # nobody comes for it
    await asyncio.sleep(0)
    assert set(boxes._boxes) == {"dead"}
    monkeypatch.setattr("deployments.pools.shared_calls._FORGOTTEN_AFTER_S", 0.0)
    new = await begun(boxes, decoding(1, "new"), caller="new")
    assert set(boxes._boxes) == {"new"}
    engine.end(new=5)
    await ends(new)
    assert boxes._boxes == {}
