"""What the replicas of the ingress tell each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from ray.exceptions import RayActorError

from deployments.api.gate.gossip import Board, board_of, keep_in_step
from deployments.api.gate.shares import Shares, Use


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_replica_reads_what_the_others_have_together() -> None:
    clock = Clock()
    board = Board(clock)
    assert board.tell("a", {"crowd": (3, 9)}) == {}
    assert board.tell("b", {"crowd": (2, 4), "guest": (0, 1)}) == {"crowd": (3, 9)}
    assert board.tell("c", {}) == {"crowd": (5, 9), "guest": (0, 1)}
    assert board.tell("a", {}) == {"crowd": (2, 4), "guest": (0, 1)}
    clock.now = 3.1  # nobody has told for three seconds
    assert board.tell("c", {}) == {}


class Line:
    """The way to a board, which may be cut; each reading is waited for."""

    def __init__(self) -> None:
        self.told: list[Use] = []
        self.is_cut = False
        self.answer: Use = {"crowd": (7, 7)}

    async def tell(self, use: Use) -> Use:
        self.told.append(use)
        if self.is_cut:
            raise ConnectionError
        return self.answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (it is the product that polls)
            await asyncio.sleep(0.01)


async def test_changes_are_told_and_a_board_that_is_away_is_done_without() -> None:
    line, shares = Line(), Shares()
    shares.configure(20, 8)
    task = asyncio.create_task(keep_in_step(shares, line.tell))
    await until(lambda: shares.num_held("crowd") == 7)
    with shares.hold("guest"):
        await until(lambda: {"guest": (1, 1)} in line.told)
        line.is_cut = True
        await until(lambda: shares.num_held("crowd") == 0)
        line.is_cut = False
        await until(lambda: shares.num_held("crowd") == 7)
    task.cancel()


async def test_nobody_is_told_where_nothing_is_shared() -> None:
    line, shares = Line(), Shares()
    shares.configure(20, None)
    task = asyncio.create_task(keep_in_step(shares, line.tell))
    await asyncio.sleep(0.2)
    assert not line.told
    shares.configure(20, 8)  # keys of a second tenant have come
    await until(lambda: bool(line.told))
    task.cancel()


@pytest.mark.ray
async def test_a_board_that_died_is_started_again(ray_cluster: str) -> None:
    """Two replicas of one application read each other, before and after; another one does not."""
    import ray

    here, there, apart = board_of("board/a"), board_of("board/a"), board_of("board/b")
    await here({"crowd": (1, 2)})
    assert await there({"crowd": (3, 4)}) == {"crowd": (1, 2)}
    assert await apart({}) == {}
    ray.kill(await asyncio.to_thread(ray.get_actor, "board/a", "rapid-ingress"))
    async with asyncio.timeout(120):
        while True:
            try:
                found = await here({"crowd": (3, 3)}), await there({"crowd": (5, 5)})
            except RayActorError:
                await asyncio.sleep(0.1)
                continue
            if found == ({"crowd": (5, 5)}, {"crowd": (3, 3)}):
                break
    for name in ("board/a", "board/b"):
        ray.kill(await asyncio.to_thread(ray.get_actor, name, "rapid-ingress"))
