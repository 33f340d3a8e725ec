"""The routes of the API's own reference: its schema, and a page of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute

from deployments.api.reference.openapi import describe
from deployments.api.reference.reference_page import PAGE_HEADERS, render_page


class ReferenceRoutes:
    """The schema of an application's routes, made when it is first asked for."""

    def __init__(self, routes: Callable[[], Sequence[BaseRoute]]) -> None:
        self._routes = routes

    async def send_schema(self, request: Request) -> Response:
        """Answer with the OpenAPI schema."""
        return JSONResponse(await asyncio.to_thread(lambda: self._schema))

    async def show_page(self, request: Request) -> Response:
        """Answer with the page of the schema."""
        page = await asyncio.to_thread(lambda: render_page(self._schema))
        return HTMLResponse(page, headers=PAGE_HEADERS)

    @cached_property
    def _schema(self) -> dict[str, Any]:
        return describe(self._routes())
