"""Limits of a minute: over three ingresses, in virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.api.gate.quotas import Grant, Limits, QuotaBoard, Quotas, Window, check
from rapid.errors import TooManyRequests
from tests.deployments.api.gate.test_shares import Clock, clock
from tests.virtual_time import VirtualLoop, virtual_loop

__all__ = ["clock", "virtual_loop"]

LIMITS = Limits(requests=200, tokens=20_000)
MINUTES = 3
LATE_S = 0.04  # that a settlement may be on its way


@pytest.fixture
def board(clock: Clock) -> QuotaBoard:
    return QuotaBoard(clock)


def lacking(board: QuotaBoard, name: str, limits: Limits, tokens: int = 1) -> str | None:
    return board.reserve(name, "acme", limits, tokens).lacking


@dataclass
class Asked:
    """A request: what it reserved, and what it used once that is settled; 0 if it failed."""

    at: float
    reserved: int
    used: int | None = None
    settled_at: float = float("inf")
    failed: bool = False

    def tokens(self, now: float) -> int:
        return self.reserved if self.used is None or self.settled_at > now else self.used


class Ingresses:
    """Three ingresses, each a few milliseconds from the board, whose callers never pause."""

    def __init__(self, loop: VirtualLoop, seed: int, *, exact: bool) -> None:
        self.loop, self.random, self.exact = loop, random.Random(seed), exact
        self.board = QuotaBoard(loop.time)
        self.granted: list[Asked] = []
        self.refused: list[tuple[float, str, int, Grant]] = []

    async def call(self, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(self.random.uniform(0.0005, 0.003))
        found = getattr(self.board, method)(*arguments)
        self.called_at = self.loop.time()
        await asyncio.sleep(self.random.uniform(0.0005, 0.003))
        return found

    async def flood(self, tokens: tuple[int, int]) -> None:
        quotas = [Quotas(self.call) for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            for each in quotas:
                for _ in range(3):
                    group.create_task(self.ask(each, tokens))

    async def ask(self, quotas: Quotas, tokens: tuple[int, int]) -> None:
        while self.loop.time() < MINUTES * 60:
            most = self.random.randint(*tokens)
            reserved = await quotas.reserve("acme", LIMITS, most)
            assert reserved is not None
            grant, reservation = reserved
            now = self.loop.time()
            if grant.lacking is not None:
                self.refused.append((now, grant.lacking, most, grant))
                await asyncio.sleep(self.random.uniform(0.2, 1.0))
                continue
            asked = Asked(now, most)
            self.granted.append(asked)
            await asyncio.sleep(self.random.uniform(0.1, 1.0))
            asked.failed = not self.exact and self.random.random() < 0.1
            asked.used = most if self.exact else self.random.randint(1, most)
            if asked.failed:
                asked.used = 0
            reservation.settle(None if asked.failed else asked.used)
            asked.settled_at = self.loop.time()

    def in_minute(self, until: float, seconds: float = 60.0) -> list[Asked]:
        return [each for each in self.granted if until - seconds < each.at <= until]


@pytest.mark.parametrize("exact", [True, False], ids=["used what it reserved", "used less"])
@pytest.mark.parametrize(
    ("binding", "tokens"),
    [("tokens", (50, 900)), ("requests", (1, 90))],
    ids=["tokens", "requests"],
)
def test_never_over_and_never_refused_under(
    virtual_loop: VirtualLoop, binding: str, tokens: tuple[int, int], exact: bool
) -> None:
    ingresses = Ingresses(virtual_loop, seed=7, exact=exact)
    with asyncio.Runner(loop_factory=lambda: virtual_loop) as runner:
        runner.run(ingresses.flood(tokens))
    assert len(ingresses.granted) > 100
    assert binding in {what for _, what, *_ in ingresses.refused}
    for each in ingresses.granted[::3]:
        minute = ingresses.in_minute(each.at)
        assert sum(one.used or 0 for one in minute) <= 1.01 * LIMITS.tokens
        assert sum(not one.failed for one in minute) <= 1.01 * LIMITS.requests
    for now, what, need, grant in ingresses.refused[::5]:
        # A tenth of a second longer, and the milliseconds on the way.
        minute = ingresses.in_minute(now, 60.1 + LATE_S)
        if what == "tokens":
            reserved = sum(one.tokens(now - LATE_S) for one in minute)
            assert reserved + need > 0.99 * LIMITS.tokens
        else:
            open_ones = sum(not (one.failed and one.settled_at < now - LATE_S) for one in minute)
            assert open_ones + 1 > 0.99 * LIMITS.requests
        assert 0 < grant.retry_s <= 60.2
    if exact:
        whole = sum(each.used or 0 for each in ingresses.granted), len(ingresses.granted)
        share = whole[0] / LIMITS.tokens if binding == "tokens" else whole[1] / LIMITS.requests
        assert 0.99 * MINUTES <= share <= 1.01 * MINUTES


def test_who_waits_as_long_as_told_is_let_in(board: QuotaBoard, clock: Clock) -> None:
    limits = Limits(tokens=100)
    for number, tokens in enumerate((30, 30, 40)):
        assert lacking(board, str(number), limits, tokens) is None
        clock.now += 7
    refused = board.reserve("x", "acme", limits, 50)
    assert refused.lacking == "tokens"
    clock.now += refused.retry_s - 0.15
    assert lacking(board, "x", limits, 50) == "tokens"
    clock.now += 0.2
    assert lacking(board, "x", limits, 50) is None


def test_what_is_used_less_is_there_at_once(board: QuotaBoard, clock: Clock) -> None:
    limits = Limits(requests=5, tokens=100)
    grant = board.reserve("a", "acme", limits, 90)
    assert (grant.requests.remaining, grant.tokens.remaining) == (4, 10)  # type: ignore[union-attr]
    assert lacking(board, "b", limits, 20) == "tokens"
    board.settle("a", 15)
    grant = board.reserve("b", "acme", limits, 20)
    assert (grant.requests.remaining, grant.tokens.remaining) == (3, 65)  # type: ignore[union-attr]
    assert grant.tokens.reset_s == pytest.approx(60.1)  # type: ignore[union-attr]
    board.settle("b", None)
    board.settle("b", 100)  # it is over
    grant = board.reserve("c", "acme", limits, 85)
    assert (grant.lacking, grant.requests.remaining) == (None, 3)  # type: ignore[union-attr]
    clock.now += 61
    grant = board.reserve("d", "acme", limits, 1)
    assert (grant.requests.remaining, grant.tokens.remaining) == (4, 99)  # type: ignore[union-attr]


def test_a_request_over_the_whole_limit_is_let_in_alone_and_worked_off(
    board: QuotaBoard, clock: Clock
) -> None:
    limits = Limits(tokens=100)
    assert lacking(board, "small", limits, 1) is None
    assert lacking(board, "large", limits, 1000) == "tokens"
    clock.now += 60.2
    assert lacking(board, "large", limits, 1000) is None
    board.settle("large", 450)
    for minute in range(4):
        assert lacking(board, "next", limits, 51) == "tokens", minute
        clock.now += 60.11
    assert lacking(board, "next", limits, 51) == "tokens"
    assert lacking(board, "next", limits, 50) is None


def test_what_is_known_of_a_prompt_corrects_its_reservation(
    board: QuotaBoard, clock: Clock
) -> None:
    limits = Limits(tokens=100)
    assert lacking(board, "a", limits, 95) is None
    board.correct("a", 40)
    assert lacking(board, "b", limits, 60) is None
    clock.now += 90
    board.settle("a", 145)  # more than it reserved, when that has long left the window
    assert lacking(board, "c", limits, 1) == "tokens"


def test_long_prompts_are_read_a_few_at_a_time(board: QuotaBoard, clock: Clock) -> None:
    limits, long = Limits(long_prefills=2), 200_000
    assert [lacking(board, name, limits, long) for name in "abc"] == [None, None, "long prefills"]
    assert lacking(board, "short", limits, 1000) is None
    assert board.reserve("other", "guest", limits, long).lacking is None
    board.end_prefill("a")
    assert lacking(board, "c", limits, long) is None
    assert lacking(board, "d", limits, long) == "long prefills"
    board.settle("b", 10)
    assert lacking(board, "d", limits, long) is None
    clock.now += 601  # their ingress has died
    assert lacking(board, "e", limits, long) is None
    assert lacking(board, "f", limits, 1000) is None
    board.correct("f", long)  # it is longer than it looked
    assert lacking(board, "g", limits, long) == "long prefills"


def test_a_window_is_the_sum_of_a_minute() -> None:
    """Against a list of all that was ever added."""
    chance, window, added = random.Random(3), Window(), list[tuple[int, int]]()
    slot = 0
    for _ in range(3000):
        slot += chance.choice([0, 0, 1, 7, 90])
        window.move_to(slot)
        amount = chance.randint(1, 20)
        window.add(slot, amount, 10**9)
        added.append((slot, amount))
        if chance.random() < 0.4:
            index = chance.randrange(max(0, len(added) - 50), len(added))
            at, whole = added[index]
            back = chance.randint(0, whole)
            window.add(at, -back, 10**9)
            added[index] = at, whole - back
        inside = [(at, each) for at, each in added if at > slot - 601]
        level = window.level(10**9)
        assert 10**9 - level.remaining == sum(each for _, each in inside)
        last = max((at for at, each in inside if each), default=slot - 601)
        assert level.reset_s == pytest.approx((last + 601 - slot) * 0.1)


def test_refusals_say_what_there_is_too_little_of() -> None:
    limits = Limits(5, 100, 1)
    for what, said in (
        ("requests", "5 requests a minute"),
        ("tokens", "100 tokens a minute: this request may use 70"),
        ("long prefills", "1 long prompts"),
    ):
        with pytest.raises(TooManyRequests, match=said) as refused:
            check(Grant(what, 4.0, None, None), limits, 70)  # type: ignore[arg-type]
        assert refused.value.retry_after_s == 4.0
    check(Grant(None, 0.0, None, None), limits, 70)


async def test_while_the_board_is_away_each_ingress_counts_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_away, board = True, QuotaBoard()

    async def call(method: str, *arguments: Any) -> Any:
        if is_away:
            raise ConnectionError
        return getattr(board, method)(*arguments)

    quotas, limits = Quotas(call), Limits(requests=1)
    for expected in (None, "requests"):
        reserved = await quotas.reserve("acme", limits, 1)
        assert reserved is not None
        assert reserved[0].lacking == expected
    assert caplog.text.count("counted here alone") == 1
    is_away = False
    reserved = await quotas.reserve("acme", limits, 1)
    assert reserved is not None
    assert reserved[0].lacking is None
    assert await quotas.reserve("free", Limits(), 10**9) is None


@pytest.mark.ray
async def test_all_ingresses_of_an_application_share_one_board(ray_cluster: str) -> None:
    import ray

    from deployments.api.gate.gossip import call_shared

    await call_shared(QuotaBoard, "quotas/a")("settle", "none", None)  # starts its process
    here, there = (Quotas(call_shared(QuotaBoard, "quotas/a")) for _ in range(2))
    limits = Limits(requests=2)
    found = [await each.reserve("acme", limits, 1) for each in (here, there, here)]
    assert [each and each[0].lacking for each in found] == [None, None, "requests"]
    assert found[0] is not None
    found[0][1].settle(None)
    async with asyncio.timeout(60):
        while (again := await there.reserve("acme", limits, 1)) and again[0].lacking:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    ray.kill(await asyncio.to_thread(ray.get_actor, "quotas/a", "rapid-ingress"))
