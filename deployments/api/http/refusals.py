"""The responses to requests that ended with an error, and their log lines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from deployments.api.http.access_log import AccessLog
from deployments.api.http.bodies import Bodies
from deployments.api.http.error_responses import HttpError, error_body, http_error
from deployments.api.http.event_feed import ClientLeft
from deployments.api.http.request_ids import read_request_id
from rapid.errors import RapidError, Unauthorized

_log = logging.getLogger(__name__)

_CLIENT_LEFT_STATUS = 499  # as proxies log it; it is never delivered

Json = dict[str, Any]


class Refusals:
    """Middleware that turns a route's errors into responses."""

    def __init__(self, bodies: Bodies, access: AccessLog) -> None:
        self._bodies, self._access = bodies, access

    def of_route(self, render: Callable[[Json], Json]) -> Middleware:
        """Return the middleware of a route whose dialect writes error bodies by `render`."""
        errors: dict[Any, Any] = {Exception: partial(self._refuse, render)}
        errors |= dict.fromkeys((ClientDisconnect, ClientLeft), _note_leaving)
        return Middleware(ExceptionMiddleware, handlers=errors)

    def of_public_route(self) -> Middleware:
        """Return the middleware of a route whose other errors are the server's."""
        errors: dict[Any, Any] = {
            HTTPException: self.refuse_path,
            RapidError: partial(self._refuse, dict),
        }
        return Middleware(ExceptionMiddleware, handlers=errors)

    async def refuse_path(self, request: Request, error: Exception) -> Response:
        """Return the response to a path or method that there is not."""
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.url.path}"
        message = {
            404: f"There is no {what}.",
            405: f"{what} is not allowed: see the Allow header.",
        }.get(error.status_code, error.detail)
        response = JSONResponse(error_body(message), error.status_code, headers=error.headers)
        await self._leave_unread(request, None, response)
        return response

    async def _refuse(
        self, render: Callable[[Json], Json], request: Request, error: Exception
    ) -> Response:
        request_id = read_request_id(request)
        if isinstance(error, Unauthorized):
            self._access.refuse(request_id, error)
        failure = log_failure(error, request_id)
        response = JSONResponse(render(failure.body), failure.status, headers=failure.headers)
        await self._leave_unread(request, getattr(request.state, "caller", None), response)
        return response

    async def _leave_unread(self, request: Request, who: object, response: Response) -> None:
        """Close the connection after a refusal whose body has not ended within a second."""
        if not await self._bodies.drain(request, who):
            response.headers["connection"] = "close"


def log_failure(error: Exception, request_id: str) -> HttpError:
    """Log the end of a request and return it as its caller is told."""
    failure = http_error(error)
    if failure.status >= 500 and failure.status != 503:
        _log.error("request %s failed", request_id, exc_info=error)
    else:
        # Without the error's message, which may quote the request.
        _log.info("request %s: %d %s", request_id, failure.status, type(error).__name__)
    return failure


async def _note_leaving(request: Request, error: Exception) -> Response:
    _log.info("request %s: the caller left", read_request_id(request))
    return Response(status_code=_CLIENT_LEFT_STATUS)
