"""A connection whose request has no end is closed, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from uvicorn.server import ServerState

from deployments.proxy.http_limits import HEAD_S, MAX_HEAD_BYTES, MAX_HEADERS, HttpWithLimits
from tests.deployments.serving import listening

HEAD = b"POST /v1/chat HTTP/1.1\r\nhost: localhost\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    request = Request(scope, receive)
    body = await request.body()
    await JSONResponse({"headers": len(request.headers), "body": len(body)})(scope, receive, send)


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    async with listening(app, http=HttpWithLimits) as address:
        yield address


async def answer(address: tuple[str, int], *pieces: bytes) -> tuple[int, Any]:
    """The status and the JSON body of the answer to a connection's bytes, which may be cut off."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await reader.readexactly(length))
    finally:
        writer.close()


async def test_a_request_within_the_limits_is_served(address: tuple[str, int]) -> None:
    headers = b"".join(b"x-%d: %b\r\n" % (each, b"v" * 500) for each in range(MAX_HEADERS - 2))
    body = b"b" * 4 * MAX_HEAD_BYTES
    request = HEAD + headers + b"content-length: %d\r\n\r\n" % len(body) + body
    assert await answer(address, request) == (200, {"headers": MAX_HEADERS, "body": len(body)})
    pieces = [request[at : at + 50_000] for at in range(0, len(request), 50_000)]
    assert await answer(address, *pieces) == (200, {"headers": MAX_HEADERS, "body": len(body)})


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([HEAD + b"x: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n"], "longer than 65536 bytes"),
        ([b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"], "longer"),
        ([HEAD + b"x: ", b"a" * MAX_HEAD_BYTES], "longer than 65536 bytes"),  # and no end yet
        ([HEAD + b"".join(b"x-%d: 1\r\n" % each for each in range(100)) + b"\r\n"], "than 100"),
    ],
)
async def test_a_head_that_is_too_long_is_refused(
    address: tuple[str, int], pieces: list[bytes], said: str
) -> None:
    status, body = await answer(address, *pieces)
    assert (status, body["error"]["type"]) == (431, "invalid_request_error")
    assert said in body["error"]["message"]


async def test_what_is_no_http_is_refused_in_the_same_form(address: tuple[str, int]) -> None:
    status, body = await answer(address, b"HELO there\r\n\r\n")
    assert (status, body["error"]["code"]) == (400, None)


class Transport(asyncio.Transport):
    """A connection's other end, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.said += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Timer:
    """A call that the loop is to make, unless it is cancelled."""

    def __init__(self, delay: float, call: Callable[[], None]) -> None:
        self.delay, self.call, self.is_cancelled = delay, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop whose time a test decides, and which begins no answers."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay, call))
        return self.timers[-1]

    def create_task(self, coroutine: Any) -> Any:
        coroutine.close()
        return asyncio.get_running_loop().create_future()

    def let_head_time_pass(self) -> None:
        for timer in [each for each in self.timers if not each.is_cancelled]:
            assert timer.delay == HEAD_S
            self.timers.remove(timer)
            timer.call()


@pytest.fixture
async def connection() -> tuple[HttpWithLimits, Transport, Loop]:
    """A connection in memory that has just been made."""
    loop, transport = Loop(), Transport()
    config = uvicorn.Config(app, lifespan="off")
    protocol = HttpWithLimits(config, ServerState(), {}, loop)  # type: ignore[arg-type]
    protocol.connection_made(transport)
    return protocol, transport, loop


Connection = tuple[HttpWithLimits, Transport, Loop]


async def test_a_head_that_does_not_end_in_time_is_refused(connection: Connection) -> None:
    protocol, transport, loop = connection
    for piece in (HEAD, b"x: a", b"a", b"a"):
        protocol.data_received(piece)
    loop.let_head_time_pass()
    assert transport.said.startswith(b"HTTP/1.1 408 ")
    assert transport.is_closed


async def test_a_connection_without_a_request_is_closed_in_silence(connection: Connection) -> None:
    _, transport, loop = connection
    loop.let_head_time_pass()
    assert transport.is_closed
    assert not transport.said


async def test_a_request_whose_head_has_come_may_take_its_time(connection: Connection) -> None:
    protocol, transport, loop = connection
    protocol.data_received(HEAD + b"content-length: 5\r\n\r\nb")
    loop.let_head_time_pass()
    assert not transport.is_closed


async def test_the_next_request_waits_for_the_answer_and_has_the_same_time(
    connection: Connection,
) -> None:
    protocol, transport, loop = connection
    protocol.data_received(HEAD + b"\r\n" + HEAD)
    loop.let_head_time_pass()
    assert not transport.is_closed
    protocol.cycle.response_complete = True
    loop.let_head_time_pass()
    assert transport.said.startswith(b"HTTP/1.1 408 ")


async def test_bytes_that_begin_nothing_do_not_keep_a_connection(connection: Connection) -> None:
    protocol, transport, loop = connection
    protocol.data_received(HEAD + b"\r\n")
    protocol.cycle.response_complete = True
    protocol.data_received(b"\r\n")
    loop.let_head_time_pass()
    assert transport.is_closed


async def test_endless_trailers_close_the_connection_in_the_midst_of_an_answer(
    connection: Connection,
) -> None:
    protocol, transport, _ = connection
    protocol.data_received(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nb\r\n0\r\nx: ")
    for _ in range(4):
        protocol.data_received(b"a" * (MAX_HEAD_BYTES // 3))
    assert transport.is_closed
    assert not transport.said
