"""The real ingress and library over an orchestrator that does what a question's words ask for.

    python -m tests.console.fake_application    # prints its address, and serves until it is ended

Under ``/`` there are no keys, under ``/keyed`` there are the key ``sk-a`` and the operator's key
``sk-op``, under ``/texts`` no library, under ``/two`` two models, and under ``/small`` the embedded
models, which answer by themselves. ``POST /loading`` has the
server say that its models are loading, until ``POST /loaded``, and ``POST /state`` have it say what
the body does. ``POST /restart`` ends another server, whose address it answers, a moment later, and
starts it again.
"""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey, ModelCard
from deployments.config.tenants import hash_key
from library.accounts.books import Accounts
from library.ingestion import Ingestion
from library.library_access import LibraryAccess
from library.library_config import LibraryConfig
from rapid.chat_messages import Document
from rapid.errors import Overloaded, PromptTooLong, TooManyRequests
from rapid.events import Finished, GenerationEvent, Reading, Started, TextDelta
from rapid.messages import GenerateRequest
from rapid.receipt import ChunkUsed, Citation, Citations, ExplainedToken, Explanation
from tests.console.small_models import SmallModels
from tests.deployments.api.files.test_files_by_sdk import Searching
from tests.deployments.scripted import receipt
from tests.deployments.serving import served
from tests.library.libraries import FakeIndex
from tests.ports import free_port

KEY, OPERATOR = "sk-a", "sk-op"
MAX_FILE = 2_000_000  # bytes, so that a test may send more
NO_EVIDENCE = "the retrieved passages are not about the question"
_PIECE = re.compile(r"\S+\s*")
_FAST = 6000  # tokens of the answer to "fast", a hundred a second
_AWAY_S = 1.5  # for which a server that starts again is away
_POOL = {"replicas": 1, "starting": 0, "stopping": 0, "status": "HEALTHY"}
_ENGINE = {"name": "target/a1", "pool": "target", "status": "ok", "page_tokens": 16}
_ENGINE |= {"leases_open": 3, "max_leases": 16, "leases_waiting": 0, "tokens_waiting": 0}
_ENGINE |= {"kv_pages_in_use": 410, "kv_pages_total": 1000, "max_context": 32768}
_ENGINE |= {"host_tokens": 12000, "host_tokens_restored": 3000}
_ENGINE |= {"disk_tokens": 0, "disk_tokens_read": 0}
STATE = {
    "ready": True,
    "pools": {"ingress": _POOL, "target": _POOL},
    "engines": [_ENGINE],
    "metrics": ["http://127.0.0.1:9100/metrics"],
}


class Obedient(Searching):
    """Answers with the first sentence of the documents that shares a number with the question.

    ``busy`` refuses every other time, ``full`` always; ``long`` is too long but for retrieval;
    ``weather`` is nothing in the documents; ``slow`` waits, and tells of its reading; ``script``
    answers with markup, ``bidi`` with signs that turn the writing around and a very long word;
    ``fast`` answers for a minute; ``alone`` has no drafter; a stream breaks ``once``, or
    ``always``, where its words say so.
    """

    def __init__(self, library: LibraryAccess) -> None:
        super().__init__(library)
        self.is_busy = False
        self.state = STATE

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent]:
        question = request.messages[-1].text
        mode = request.speculation.mode
        if "busy" in question:
            self.is_busy = not self.is_busy
            if self.is_busy:
                raise TooManyRequests("This tenant has as many requests as it may.", 2.0)
        if "full" in question:
            raise Overloaded("No engine has room.", 30.0)
        if "long" in question and mode != "rag":
            raise PromptTooLong.of(4096, "the prompt has 9000 tokens", "rapid.documents")
        if "slow" in question:
            await asyncio.sleep(1.5)  # as one that waits for its leases
            for num_read in range(0, 8001, 1000):
                yield Reading(num_read, 8000)
                await asyncio.sleep(0.2)
        texts = await self._library.resolve(request.tenant, request.documents)
        is_about = bool(texts) and "weather" not in question
        resolved = ("fused" if is_about else "plain") if mode == "auto" else mode
        reason = "retrieval found evidence" if is_about else NO_EVIDENCE
        yield Started(resolved, reason, "fused", "evidence found")  # type: ignore[arg-type]
        found = _find(texts, question) if is_about else None
        text = found[1] if found else "The documents do not say."
        if "script" in question:
            text = "<img src=x onerror=alert(1)><script>alert(2)</script>"
        if "bidi" in question:
            text = "\u202egnp.exe \u2066 " + "x" * 100_000
        if "fast" in question:
            async for event in _hurry():
                yield event
        for piece in _PIECE.findall(text):
            yield TextDelta(0, piece)
            await asyncio.sleep(0.03)
        yield TextDelta(0, "", finish_reason="stop")
        said = replace(
            receipt(),
            mode=resolved,
            reason=reason,
            prompt_tokens=8120,
            cached_tokens=8000,
            chunks=(),
        )
        if request.explain:
            tokens = tuple(_explain(text, resolved, "c1" if found else None))
            is_cut = "cut" in question
            shown = tokens[:3] if is_cut else tokens
            said = replace(said, explanation=Explanation((), (), (), (), (), (shown,), is_cut))
        if found:
            document, quote, start = found
            end = start + len(quote)
            chunk = ChunkUsed("c1", document.name, 2.0, start, end)
            place = (document.name, "c1", start, end, quote)
            cited = Citations((Citation(0, 0, len(quote), "copied", *place),), (), "measured")
            said = replace(said, chunks=(chunk,), citations=cited)
            if "fast" in question:
                ends = range(len(_WORD), _FAST * len(_WORD), 30 * len(_WORD))
                many = (Citation(0, end - len(_WORD), end, "copied", *place) for end in ends)
                said = replace(said, citations=Citations(tuple(many), (), "measured"))
        if "alone" in question:
            said = replace(said, mode="plain", reason="no drafter could be had", is_fallback=True)
        yield Finished(said)


def _explain(text: str, mode: str, passage: str | None) -> Iterator[ExplainedToken]:
    """Yield the words of an answer, of which a drafter has written all but the second and last."""
    pieces = _PIECE.findall(text)
    for place, piece in enumerate(pieces):
        if mode == "plain":
            yield ExplainedToken(piece, "target", 0.75, None, 0.75)
        elif mode == "rag":
            yield ExplainedToken(piece, "drafter", None, 0.5, 0.5, passage)
        elif place == 1:
            yield ExplainedToken(piece, "corrected", 0.625, 0.03125, 0.5, passage)
        elif place == len(pieces) - 1:
            yield ExplainedToken(piece, "target", 0.75, None, 0.75)
        else:
            yield ExplainedToken(piece, "drafted", 0.25, 0.875, 0.7, passage)


_WORD, _LAST_WORD = "reading ", "ending\n\n"
_PARAGRAPH = 60  # words of one


async def _hurry() -> AsyncGenerator[GenerationEvent]:
    """Yield a hundred tokens a second, as a clock says."""
    clock = asyncio.get_running_loop().time
    began = clock()
    for number in range(_FAST):
        await asyncio.sleep(began + number / 100 - clock())
        yield TextDelta(0, _WORD if (number + 1) % _PARAGRAPH else _LAST_WORD)


def _find(texts: tuple[Document, ...], question: str) -> tuple[Document, str, int] | None:
    numbers = set(re.findall(r"\d+", question))
    for text in texts:
        for line in re.finditer(r"[^\n]+", text.text):
            if numbers & set(re.findall(r"\d+", line[0])):
                return text, line[0], line.start()
    return None


class Breaking:
    """Breaks the connection of a streamed answer whose question says so, in its middle."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = b""
        is_again = any(name == b"last-event-id" for name, _ in scope.get("headers", ()))
        left = 1 if is_again else 6  # parts of the body: the role, and some words

        async def listen() -> Message:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            return message

        async def pass_on(message: Message) -> None:
            nonlocal left
            breaks = b"always" in body or (b"once" in body and not is_again)
            if message["type"] == "http.response.body" and breaks:
                left -= 1
                if not left:
                    raise ConnectionResetError
            await send(message)

        await self._app(scope, listen if scope["type"] == "http" else receive, pass_on)


class Restarting:
    """A server that ends in the middle of what it does, and starts again at the same address."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._address = ("127.0.0.1", free_port())
        self.url = f"http://127.0.0.1:{self._address[1]}"
        self.ending = asyncio.Event()

    async def run(self) -> None:
        """Serve until this is cancelled."""
        while True:
            with socket.create_server(self._address) as listener:
                server = uvicorn.Server(
                    uvicorn.Config(self._app, log_level="critical", lifespan="off", ws="none")
                )
                running = asyncio.create_task(server.serve(sockets=[listener]))
                await self.ending.wait()
                self.ending.clear()
                for connection in list(server.server_state.connections):
                    connection.transport.abort()  # type: ignore[union-attr]
                server.should_exit = server.force_exit = True
                await running
            await asyncio.sleep(_AWAY_S)


async def serve() -> None:
    """Serve until this is cancelled."""
    with tempfile.TemporaryDirectory() as folder:
        access = LibraryAccess(LibraryConfig(folder=Path(folder), max_file_bytes=MAX_FILE))
        service = Obedient(access)
        config = ApiConfig(model="demo", default_temperature=0)
        keys = (
            ApiKey(tenant="a", sha256=hash_key(KEY)),
            ApiKey(tenant="ops", sha256=hash_key(OPERATOR), operator=True),
        )
        cards = {
            "embedded": ModelCard(target="target", is_embedded=True),
            "english": ModelCard(target="target"),
        }
        small = {"demo": ModelCard(default_temperature=0, is_embedded=True)}
        accounts = Accounts(access.database)
        restarting = Restarting(Ingress(service, config, library=access))

        async def switch(request: Request) -> Response:
            is_ready = request.url.path == "/loaded"
            service.state = STATE | {
                "ready": is_ready,
                "reason": "the target's weights are loading",
            }
            return Response()

        async def say(request: Request) -> Response:
            service.state = await request.json()
            return Response()

        async def restart(request: Request) -> Response:
            if await request.body():
                restarting.ending.set()
            return Response(restarting.url)

        app = Starlette(
            routes=[
                Route("/loading", switch, methods=["POST"]),
                Route("/loaded", switch, methods=["POST"]),
                Route("/state", say, methods=["POST"]),
                Route("/restart", restart, methods=["POST"]),
                Mount(
                    "/keyed",
                    Ingress(service, config.model_copy(update={"keys": keys}), library=access),
                ),
                Mount("/texts", Ingress(service, config)),
                Mount(
                    "/small", Ingress(SmallModels(), config.model_copy(update={"models": small}))
                ),
                Mount("/two", Ingress(service, config.model_copy(update={"models": cards}))),
                Mount("/", Ingress(service, config, library=access, accounts=accounts)),
            ]
        )
        async with served(Breaking(app)) as url, asyncio.TaskGroup() as group:
            group.create_task(Ingestion(await access.get(), FakeIndex()).run())
            group.create_task(restarting.run())
            print(url, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
