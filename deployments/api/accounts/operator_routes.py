"""The routes of the server's state: ``/ready``, and ``/v1/admin/state`` for operators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.api.accounts.account_routes import Endpoint
from deployments.api.backend.service import GenerationService
from deployments.api.http.access_log import AccessLog
from rapid.errors import TargetUnavailable

_READY_S = 2.0  # less than the proxy's patience (`proxy.ready_in_time.DEADLINE_S`)


class OperatorRoutes:
    """The endpoints for operators; iterating yields them."""

    def __init__(self, service: GenerationService, access: AccessLog) -> None:
        self._service, self._access = service, access

    def __iter__(self) -> Iterator[Endpoint]:
        """Yield the endpoints."""
        yield "GET", "/v1/admin/state", "admin", self._show_state

    async def _show_state(self, request: Request) -> Response:
        """Answer from what is known here, so that no question waits for it."""
        state = await _read_state(self._service)
        return JSONResponse(
            {
                "object": "server_state",
                "ready": bool(state["ready"]),
                "reason": state.get("reason"),
                "models": state.get("models", {}),
                "pools": state.get("pools", {}),
                "engines": state.get("engines", []),
                "passages": state.get("passages", []),
                "metrics": state.get("metrics", []),
                "requests": self._access.counts(),
            }
        )

    async def show_readiness(self, request: Request) -> Response:
        """Say whether the application answers; to operators also with what it is made of."""
        state = await _read_state(self._service)
        is_ready = bool(state["ready"])
        of_all = {name: state[name] for name in ("ready", "reason") if name in state}
        is_operator = request.state.key is not None and "admin" in request.state.key.scopes
        shown = state if is_operator else of_all
        if is_ready:
            return JSONResponse(shown)
        return JSONResponse(shown, 503, headers={"retry-after": "1"})


async def _read_state(service: GenerationService) -> dict[str, Any]:
    """Return the state of the application.

    Raises:
        TargetUnavailable: It is not known.
    """
    try:
        async with asyncio.timeout(_READY_S):
            return await service.ready()
    except Exception as error:  # any error means that the application is not ready
        raise TargetUnavailable("The state of the application is not known.") from error
