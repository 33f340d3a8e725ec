"""Authentication of the requests to a route, as middleware around its handler."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.config.tenants import Tenants

_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-real-ip")

Identify = Callable[..., object]
"""`Tenants.identify` or `Tenants.is_operator`: what a route's handler must know of its caller."""


class Authentication:
    """Middleware that lets a handler find in ``request.state.caller`` who calls."""

    def __init__(self, app: ASGIApp, tenants: Callable[[], Tenants], identify: Identify) -> None:
        """Wrap a handler, before which the tenants of the moment are asked to identify."""
        self._app, self._tenants, self._identify = app, tenants, identify

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Identify the caller, and only then call the handler."""
        request = Request(scope)
        headers = request.headers
        request.state.caller = self._identify(
            self._tenants(),
            headers.get("authorization"),
            request.client.host if request.client else None,
            headers.get("host"),
            is_forwarded=any(name in headers for name in _FORWARDED),
        )
        await self._app(scope, receive, send)
