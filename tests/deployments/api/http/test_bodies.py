"""Request bodies that arrive in parts, slowly, in numbers, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from deployments.api.gate.admission import Admission
from deployments.api.http.bodies import Bodies, BodyPace
from rapid.errors import (
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    Overloaded,
    TooManyRequests,
    UnsupportedEncoding,
)

JSON = ("application/json",)
MAX_BYTES = 30
MAX_SLOW = 2
IMPATIENT = BodyPace(quick_s=0.01, patience_s=0.02, drain_s=0.01)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Sender:
    """A client that sends its parts, each some seconds after the one before, and counts them.

    After the last one nothing comes, unless that part ends the body.
    """

    def __init__(
        self,
        parts: Sequence[bytes] | int,
        *,
        clock: Clock | None = None,
        every_s: float = 0.0,
        is_whole: bool = True,
        **headers: str,
    ) -> None:
        self.parts = [b"x" * 10] * parts if isinstance(parts, int) else list(parts)
        self.clock, self.every_s, self.is_whole = clock or Clock(), every_s, is_whole
        self.taken = 0
        self.go = asyncio.Event()
        self.go.set()
        given = {"content-type": "application/json"} | headers
        pairs = [(name.replace("_", "-").encode(), v.encode()) for name, v in given.items()]
        self.request = Request({"type": "http", "headers": pairs}, self.receive)

    async def receive(self) -> Any:
        await self.go.wait()
        if self.taken == len(self.parts):
            await asyncio.Event().wait()
        self.clock.now += self.every_s
        self.taken += 1
        is_last = self.is_whole and self.taken == len(self.parts)
        return {
            "type": "http.request",
            "body": self.parts[self.taken - 1],
            "more_body": not is_last,
        }


def bodies(
    clock: Clock | None = None, *, max_requests: int = 8, pace: BodyPace = IMPATIENT
) -> Bodies:
    admission = Admission(clock=clock or Clock(), wait_s=0.0)
    admission.limit(max_requests, max_requests, shared=4)
    reading = Bodies(admission, clock=clock or Clock(), pace=pace)
    reading.limit(MAX_BYTES, MAX_SLOW)
    return reading


async def read(reading: Bodies, sender: Sender, tenant: str = "acme") -> bytes:
    async with reading.body(sender.request, tenant, JSON) as body:
        return body


@asynccontextmanager
async def silent(
    reading: Bodies, number: int, tenant: str
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """So many bodies that have begun to come and do not go on."""
    senders = [Sender(1, is_whole=False) for _ in range(number)]
    tasks = [asyncio.create_task(read(reading, each, tenant)) for each in senders]
    pairs = list(zip(senders, tasks, strict=True))
    while any(not each.taken and not task.done() for each, task in pairs):  # noqa: ASYNC110
        await asyncio.sleep(0)
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TestSizes:
    async def test_a_body_at_the_limit_is_returned_whole(self) -> None:
        assert await read(bodies(), Sender(3)) == b"x" * 30

    @pytest.mark.parametrize(
        ("sender", "num_taken"), [(Sender(4), 4), (Sender(4, content_length="40"), 0)]
    )
    async def test_a_long_body_is_refused_as_soon_as_it_is_known(
        self, sender: Sender, num_taken: int
    ) -> None:
        with pytest.raises(BodyTooLarge, match="limit of 30 bytes"):
            await read(bodies(), sender)
        assert sender.taken == num_taken

    async def test_another_media_type_is_not_read(self) -> None:
        sender = Sender(5, **{"content-type": "text/plain"})
        with pytest.raises(BadRequest, match="Send the body with 'Content-Type: application/json'"):
            await read(bodies(), sender)
        assert sender.taken == 0

    async def test_an_encoded_body_is_refused_by_the_name_of_its_header(self) -> None:
        with pytest.raises(UnsupportedEncoding, match="Content-Encoding") as refused:
            await read(bodies(), Sender(1, content_encoding="gzip"))
        assert refused.value.param == "Content-Encoding"
        assert await read(bodies(), Sender(1, content_encoding="identity")) == b"x" * 10

    @pytest.mark.parametrize("headers", [{}, {"content_length": "10"}])
    async def test_the_bodies_of_a_tenant_that_wait_are_bounded(
        self, headers: dict[str, str]
    ) -> None:
        """Four of thirty bytes wait; a fifth is not read, not even where its length is known."""
        reading = bodies()
        async with AsyncExitStack() as waiting:
            for _ in range(4):
                await waiting.enter_async_context(reading.body(Sender(3).request, "crowd", JSON))
            refused = Sender(1, **headers)
            with pytest.raises(TooManyRequests, match="120 bytes"):
                await read(reading, refused, "crowd")
            assert refused.taken == (0 if headers else 1)
            assert await read(reading, Sender(3), "guest") == b"x" * 30
        assert await read(reading, Sender(3), "crowd") == b"x" * 30


class TestPaces:
    async def test_a_byte_now_and_then_is_not_in_time(self) -> None:
        clock = Clock()
        sender = Sender([b"x"] * 30, clock=clock, every_s=3.0)
        with pytest.raises(BodyTooSlow, match="4 bytes came in 10 seconds"):
            await read(bodies(clock, pace=BodyPace()), sender)
        assert sender.taken == 4

    async def test_silence_is_not_in_time(self) -> None:
        with pytest.raises(BodyTooSlow, match="10 bytes"):
            await read(bodies(), Sender(1, is_whole=False))

    async def test_what_keeps_the_least_rate_is_read_for_a_minute_at_most(self) -> None:
        """Ten bytes a second are asked for, and come; without the most it would take an hour."""
        clock = Clock()
        pace = BodyPace(bytes_per_s=10)
        assert await read(bodies(clock, pace=pace), Sender(3, clock=clock, every_s=4.0))
        reading = bodies(clock, pace=pace)
        reading.limit(10_000, MAX_SLOW)
        sender = Sender(1000, clock=clock, every_s=1.0)
        with pytest.raises(BodyTooSlow, match="60 seconds"):
            await read(reading, sender)

    async def test_who_hangs_up_is_not_waited_for(self) -> None:
        sender = Sender(1)

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        sender.request = Request(sender.request.scope, receive)
        with pytest.raises(ClientDisconnect):
            await read(bodies(), sender)


class TestManySlowBodies:
    PATIENT = BodyPace(quick_s=0.01, patience_s=60.0)

    async def test_a_few_of_a_tenant_may_be_slow_and_the_others_are_refused(self) -> None:
        reading = bodies(max_requests=16, pace=self.PATIENT)
        async with silent(reading, 6, "crowd") as tasks:
            done, slow = await asyncio.wait(tasks, timeout=5, return_when="ALL_COMPLETED")
            assert len(slow) == MAX_SLOW
            for each in done:
                assert isinstance(each.exception(), TooManyRequests)
            assert await read(reading, Sender(3), "crowd") == b"x" * 30

    async def test_they_leave_room_for_others(self) -> None:
        """Of eight requests at once a tenant sends four bodies, and then half of what is left."""
        reading = bodies(pace=BodyPace(quick_s=60.0))
        async with silent(reading, 100, "crowd") as tasks:
            assert sum(task.done() for task in tasks) == 96
            assert await read(reading, Sender(3), "guest") == b"x" * 30
            async with silent(reading, 100, "guest"):
                with pytest.raises(TooManyRequests):
                    await read(reading, Sender(3), "crowd")
        assert await read(reading, Sender(3), "crowd") == b"x" * 30

    async def test_a_tenant_alone_may_fill_the_server(self) -> None:
        admission = Admission(clock=Clock())
        admission.limit(8, 8)
        reading = Bodies(admission, clock=Clock(), pace=BodyPace(quick_s=60.0))
        reading.limit(MAX_BYTES, MAX_SLOW)
        async with silent(reading, 8, "local") as tasks:
            assert not any(task.done() for task in tasks)
            with pytest.raises(Overloaded):
                await read(reading, Sender(3), "local")


class TestDrains:
    async def test_a_body_that_nobody_wants_is_read_to_its_end(self) -> None:
        sender = Sender(5)
        assert await bodies().drain(sender.request, "acme")
        assert sender.taken == 5

    @pytest.mark.parametrize("is_whole", [True, False])
    async def test_it_is_read_for_a_second_only(self, is_whole: bool) -> None:
        clock = Clock()
        sender = Sender(10, clock=clock, every_s=0.4, is_whole=is_whole)
        assert not await bodies(clock, pace=BodyPace()).drain(sender.request, "acme")
        assert sender.taken == 3

    async def test_it_is_not_read_without_end(self) -> None:
        sender = Sender(1_000)
        assert not await bodies().drain(sender.request, "acme")
        assert sender.taken == 13  # four times the limit

    async def test_silence_ends_it(self) -> None:
        assert not await bodies().drain(Sender(0, is_whole=False).request, "acme")

    async def test_of_many_only_a_few_are_read_on(self) -> None:
        reading = bodies(pace=BodyPace(drain_s=60.0))
        senders = [Sender(1, is_whole=False) for _ in range(5)]
        tasks = [asyncio.create_task(reading.drain(each.request, "crowd")) for each in senders]
        for _ in range(5):
            await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [False, False, True, True, True]
        assert await reading.drain(Sender(5).request, "guest")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
