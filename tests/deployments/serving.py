"""A real HTTP server for an ASGI application, on a free loopback port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve `app` and yield its URL."""
    async with listening(app) as (host, port):
        yield f"http://{host}:{port}"


@asynccontextmanager
async def listening(app: ASGIApp, **options: Any) -> AsyncIterator[tuple[str, int]]:
    """Serve `app` with these options of uvicorn, and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none", **options)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.005)
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await running
