"""Clients that mean no good, in a process of their own.

Their work must not delay those whose waiting is measured, nor what measures it. Ray starts servers
with a niceness of 15, so that a client beside them would come before them; these have the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from rapid.embedded.generator import generate_document
from tests.faults.clients import NUM_QUESTIONS, PATIENCE_S, body

HOSTILE_KEY = "sk-hostile"
NUM_CLIENTS = 150
NUM_SLOW = 600
NUM_READERS = 16
_NUM_SLOW_HEADS = 50
_NICENESS = 15
_HEADERS = {"authorization": f"Bearer {HOSTILE_KEY}", "content-type": "application/json"}

Hostility = Callable[[str, "asyncio.Future[None]"], Awaitable[None]]
"""Function of a server's address that prepares itself, waits for the future and is hostile."""


class Hostile:
    """A process that is ready to be hostile to a server, and is as soon as it is let loose."""

    def __init__(self, hostility: Hostility, url: str) -> None:
        """Start the process, and wait until it is ready."""
        spawn = multiprocessing.get_context("spawn")
        self._line, far = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(hostility, url, far), daemon=True)
        self._process.start()
        far.close()  # so that a process that ends early is noticed below
        self._line.recv()

    def let_loose(self) -> None:
        """Let the process begin."""
        self._line.send(None)

    def end(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def _run(hostility: Hostility, url: str, line: Any) -> None:
    os.nice(max(0, _NICENESS - os.nice(0)))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        begins: asyncio.Future[None] = loop.create_future()
        doing = asyncio.ensure_future(hostility(url, begins))
        await asyncio.sleep(0)
        line.send(None)
        await asyncio.to_thread(line.recv)
        begins.set_result(None)
        await doing

    asyncio.run(run())


async def long_bodies(url: str, begins: asyncio.Future[None]) -> None:
    """Send eight bodies of forty thousand messages, and leave after four seconds."""
    bodies = list(hostile_bodies())
    async with httpx.AsyncClient(base_url=url, headers=_HEADERS, timeout=4.0) as http:

        async def send(content: bytes) -> None:
            with contextlib.suppress(httpx.HTTPError):
                await http.post("/v1/chat/completions", content=content)

        await begins
        await asyncio.gather(*map(send, bodies))


def hostile_bodies() -> Iterator[bytes]:
    """Eight bodies of 1.4 MB: 40,000 one-letter messages each, in mode `rag`."""
    messages = [{"role": "system", "content": "x"}] * 40_000
    for index in range(8):
        question = {"role": "user", "content": f"Which? {index}"}
        yield json.dumps(
            {
                "model": "rapid-embedded",
                "messages": [*messages, question],
                "rapid": {"mode": "rag"},
            }
        ).encode()


async def abandoned_documents(url: str, begins: asyncio.Future[None]) -> None:
    """Ask about sixty new documents of a megabyte, and hang up after a second and a half."""
    bodies = [json.dumps(_about_a_long_document(index)).encode() for index in range(60)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=_HEADERS, limits=limits, timeout=PATIENCE_S
    ) as http:

        async def ask(content: bytes) -> None:
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with asyncio.timeout(1.5):
                    await http.post("/v1/chat/completions", content=content)

        await begins
        await asyncio.gather(*map(ask, bodies))


def _about_a_long_document(index: int) -> dict[str, Any]:
    """A request in mode `rag` about 1,000,000 characters, which no other request has."""
    document = generate_document(f"abandoned {index}", 2_000)
    text = "\n\n".join([f"Copy {index}-{part}. {document.text}" for part in range(400)])
    return {
        "model": "rapid-embedded",
        "messages": [{"role": "user", "content": document.questions[0].question}],
        "rapid": {"mode": "rag", "documents": [{"name": document.name, "text": text[:1_000_000]}]},
    }


async def long_heads(url: str, begins: asyncio.Future[None]) -> None:
    """Send, without a key, requests whose heads do not end, and begin again when one is cut off.

    One connection has an endless header, one thousands of headers, and fifty a byte a second.
    """
    address = urlsplit(url)

    async def send(pieces: Callable[[], Iterator[bytes]], pause_s: float) -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                try:
                    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
                    for piece in pieces():
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(pause_s)
                finally:
                    writer.close()
            await asyncio.sleep(0.2)

    await begins
    slow = [send(lambda: itertools.repeat(b"a"), 1.0) for _ in range(_NUM_SLOW_HEADS)]
    await asyncio.gather(send(endless_header, 0.0), send(thousands_of_headers, 0.0), *slow)


def endless_header() -> Iterator[bytes]:
    """A header whose value does not end."""
    yield b"x: "
    yield from itertools.repeat(b"a" * 2**16)


def thousands_of_headers() -> Iterator[bytes]:
    """Ten thousand short headers, in one piece, and the end of the request's head."""
    yield b"".join(b"x-%d: 1\r\n" % number for number in range(10_000)) + b"\r\n"


async def crowd(url: str, begins: asyncio.Future[None]) -> None:
    """Ask with 150 clients of one tenant, each again as soon as it is answered."""
    bodies = [json.dumps(body(each)).encode() for each in range(NUM_QUESTIONS)]
    await _ask_without_pause(
        url, begins, NUM_CLIENTS, lambda index, _: bodies[index % NUM_QUESTIONS]
    )


async def new_documents(url: str, begins: asyncio.Future[None]) -> None:
    """Ask with sixteen streams without pause, each time about a thousand tokens that are new."""
    documents = [generate_document(f"new {each}", 1_000) for each in range(NUM_READERS)]
    asked = {"model": "rapid-embedded", "stream": True, "max_tokens": 64}

    def write(index: int, number: int) -> bytes:
        question = {"role": "user", "content": documents[index].questions[0].question}
        text = f"Copy {index}-{number}.\n\n{documents[index].text}"
        document = {"name": documents[index].name, "text": text}
        rapid = {"documents": [document]}
        return json.dumps(asked | {"messages": [question], "rapid": rapid}).encode()

    await _ask_without_pause(url, begins, NUM_READERS, write)


async def _ask_without_pause(
    url: str, begins: asyncio.Future[None], num_clients: int, write: Callable[[int, int], bytes]
) -> None:
    """Send the bodies that `write` returns for a client and the number of its question.

    Clients come one second after a refusal, whatever `Retry-After` says.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=_HEADERS, limits=limits, timeout=PATIENCE_S
    ) as http:

        async def ask(index: int) -> None:
            for number in itertools.count():
                with contextlib.suppress(httpx.HTTPError):
                    content = write(index, number)
                    reply = await http.post("/v1/chat/completions", content=content)
                    if reply.status_code == 200:
                        continue
                await asyncio.sleep(1.0)

        await begins
        await asyncio.gather(*map(ask, range(num_clients)))


async def slow_bodies(url: str, begins: asyncio.Future[None]) -> None:
    """Open 600 connections that send a byte of their bodies every two seconds.

    Who is refused comes again after ten seconds: a flood of connections is another thing.
    """

    async def send() -> None:
        async with _connected(url, _head(1_000_000)) as (reader, writer):
            while not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), 2.0)

    await _for_ever(send, NUM_SLOW, begins)


async def half_open(url: str, begins: asyncio.Future[None]) -> None:
    """Open connections that ask, whole or in part, and then neither read nor close them.

    A client whose host is gone looks like that: nothing comes from it, and nothing says so.
    """
    whole = [json.dumps(body(each) | {"stream": True}).encode() for each in range(NUM_QUESTIONS)]

    async def ask(index: int) -> None:
        content = whole[index % NUM_QUESTIONS]
        sent = content if index % 2 else content[: len(content) // 2]
        async with _connected(url, _head(len(content)) + sent):
            await asyncio.Event().wait()

    await begins
    await asyncio.gather(*map(ask, range(NUM_CLIENTS)))


async def _for_ever(
    do: Callable[[], Awaitable[None]], number: int, begins: asyncio.Future[None]
) -> None:
    async def again() -> None:
        while True:
            with contextlib.suppress(OSError):
                await do()
            await asyncio.sleep(10.0)

    await begins
    await asyncio.gather(*(again() for _ in range(number)))


def _head(length: int) -> bytes:
    """The head of a request whose body has so many bytes."""
    fields = {"host": "127.0.0.1", "content-length": str(length)} | _HEADERS
    lines = ["POST /v1/chat/completions HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


@contextlib.asynccontextmanager
async def _connected(
    url: str, sent: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection with a receive buffer of one answer's beginning, on which `sent` was sent."""
    address = httpx.URL(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (address.host, address.port or 80))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
    try:
        writer.write(sent)
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
