"""A server of files alone with its worker, for tests that kill it: ``LIBRARY PORT``.

`LIBRARY` is a `LibraryConfig` as JSON.
"""

from __future__ import annotations

import asyncio
import sys

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


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
