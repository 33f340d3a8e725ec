"""An ingress on loopback whose orchestrator says what a test wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ModelCard
from tests.deployments.scripted import ScriptedOrchestrator


class Server:
    """An ingress in a thread, until the test is over."""

    def __init__(
        self, orchestrator: ScriptedOrchestrator, *, is_embedded: bool = False, **config: object
    ) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        card = ModelCard(is_embedded=is_embedded)
        settings = ApiConfig(models={"served": card}, **config)  # type: ignore[arg-type]
        ingress = Ingress(orchestrator, settings)
        options = uvicorn.Config(ingress, log_level="error", lifespan="off", ws="none")
        self.orchestrator = orchestrator
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()

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
