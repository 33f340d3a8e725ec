"""A server of files alone with its worker, for tests that kill it: ``LIBRARY PORT``.

`LIBRARY` is a `LibraryConfig` as JSON.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import httpx
import uvicorn

from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig
from library.ingestion import Ingestion
from library.library_access import LibraryAccess
from library.library_config import LibraryConfig
from tests.deployments.scripted import ScriptedOrchestrator
from tests.library.libraries import FakeIndex


async def main(library: str, port: int) -> None:
    access = LibraryAccess(LibraryConfig.model_validate_json(library))
    app = Ingress(ScriptedOrchestrator(), ApiConfig(model="m"), library=access)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, lifespan="off", log_level="error")
    worker = asyncio.create_task(Ingestion(await access.get(), FakeIndex()).run())
    await asyncio.gather(uvicorn.Server(config).serve(), worker)


def start_server(config: LibraryConfig, port: int) -> subprocess.Popen[bytes]:
    """Start this module as a process, and return it once it answers."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.library.serve_library", config.model_dump_json(), str(port)],
        cwd=Path(__file__).parents[2],
    )
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            return server
        except httpx.HTTPError:
            assert server.poll() is None
            time.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
