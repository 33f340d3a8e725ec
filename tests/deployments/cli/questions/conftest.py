"""An ingress on loopback whose orchestrator says what a test wants."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ModelCard
from library.ingestion import Ingestion
from library.library_access import LibraryAccess
from library.library_config import LibraryConfig
from tests.deployments.scripted import ScriptedOrchestrator
from tests.library.libraries import FakeIndex


class Server:
    """An ingress in a thread, until the test is over."""

    def __init__(
        self,
        orchestrator: ScriptedOrchestrator,
        *,
        is_embedded: bool = False,
        others: Sequence[str] = (),
        library: LibraryConfig | None = None,
        **config: object,
    ) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        cards = {"served": ModelCard(is_embedded=is_embedded)} | {
            name: ModelCard() for name in others
        }
        settings = ApiConfig(models=cards, **config)  # type: ignore[arg-type]
        access = LibraryAccess(library) if library is not None else None
        ingress = Ingress(orchestrator, settings, library=access)

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            self._loop = asyncio.get_running_loop()
            await ingress(scope, receive, send)

        options = uvicorn.Config(serve, log_level="error", lifespan="off", ws="none")
        self.orchestrator = orchestrator
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=asyncio.run, args=[self._run(listener, access)])
        self._thread.start()

    async def _run(self, listener: socket.socket, access: LibraryAccess | None) -> None:
        if access is None:
            await self._server.serve(sockets=[listener])
            return
        library = await access.get()
        reading = asyncio.create_task(Ingestion(library, FakeIndex()).run())
        await self._server.serve(sockets=[listener])
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await library.close()

    def run_soon(self, act: Callable[[], None]) -> None:
        """Do something on the server's loop, once it answers somebody."""
        self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[type[Server]]:
    servers: list[Server] = []

    def start(*script: object, **config: object) -> Server:
        servers.append(Server(ScriptedOrchestrator(*script), **config))  # type: ignore[arg-type]
        return servers[-1]

    yield start  # type: ignore[misc]
    for server in servers:
        server.close()
