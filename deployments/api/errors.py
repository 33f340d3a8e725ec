"""Errors as HTTP: one table from `rapid.errors` to status and OpenAI's error body."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rapid import errors

_INVALID = "invalid_request_error"
_SERVER = "server_error"

# The first class of an error's ancestry that is listed decides.
_TABLE: dict[type[BaseException], tuple[int, str, str | None]] = {
    errors.BodyTooLarge: (413, _INVALID, "request_too_large"),
    errors.UnknownModel: (404, _INVALID, None),
    errors.BadRequest: (400, _INVALID, None),
    errors.Unauthorized: (401, "authentication_error", "invalid_api_key"),
    errors.Overloaded: (503, _SERVER, "overloaded"),
    errors.LeaseNotFound: (503, _SERVER, "lease_lost"),
    errors.DrafterUnavailable: (503, _SERVER, "drafter_unavailable"),
    errors.TargetUnavailable: (503, _SERVER, "target_unavailable"),
    errors.EngineFailed: (500, _SERVER, "engine_failed"),
    errors.OutOfStep: (500, _SERVER, "engine_failed"),
    errors.ConfigurationError: (500, _SERVER, "configuration_error"),
    errors.RapidError: (503, _SERVER, None),
}
_RETRY_AFTER_S = 1.0
_MISTAKE = "The server made a mistake; its log says which, under this response's x-request-id."


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as a client sees it."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def http_error(error: BaseException) -> HttpError:
    """Translate `error`, or what a Ray error carries in its ``cause``.

    An error outside the tree, or one of the tree with status 500, is a bug: the client learns that
    it happened, not what it says, which may hold paths or other callers' text. What was away or
    full is worth asking again, and the body says so; a bug would only happen again.
    """
    error = _unwrapped(error)
    for cls in type(error).__mro__:
        if cls in _TABLE:
            status, kind, code = _TABLE[cls]
            message = str(error)
            break
    else:
        status, kind, code = _overload(error) or (500, _SERVER, "internal_error")
        message = "The server is busy."
    if status == 500:
        message = _MISTAKE
    headers: dict[str, str] = {}
    if status in (429, 503):
        wait_s = getattr(error, "retry_after_s", _RETRY_AFTER_S)
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    param = getattr(error, "param", None)
    code = getattr(error, "code", None) or code
    body = error_body(message, kind, param, code, is_retryable=status == 503)
    return HttpError(status, body, headers)


def error_body(
    message: str,
    kind: str = _INVALID,
    param: str | None = None,
    code: str | None = None,
    *,
    is_retryable: bool = False,
) -> dict[str, Any]:
    """OpenAI's error body, and whether the same request may succeed when it is sent again."""
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
            "retryable": is_retryable,
        }
    }


def _unwrapped(error: BaseException) -> BaseException:
    """What was raised remotely; known by its shape, so that Ray need not be imported here."""
    while isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error


def _overload(error: BaseException) -> tuple[int, str, str] | None:
    """Serve's own refusal when a deployment's queue is full."""
    if type(error).__name__ == "BackPressureError":
        return 503, _SERVER, "overloaded"
    return None
