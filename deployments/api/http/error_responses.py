"""Translation of `rapid.errors` to HTTP statuses and OpenAI's error bodies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rapid import errors

_INVALID = "invalid_request_error"
_SERVER = "server_error"

# The first listed class in an error's method resolution order decides.
_TABLE: dict[type[BaseException], tuple[int, str, str | None]] = {
    errors.BodyTooLarge: (413, _INVALID, "request_too_large"),
    errors.BodyTooSlow: (408, _INVALID, "request_timeout"),
    errors.UnsupportedEncoding: (415, _INVALID, "unsupported_encoding"),
    errors.UnknownModel: (404, _INVALID, None),
    errors.UnknownDocument: (404, _INVALID, "document_not_found"),
    errors.DocumentNotReady: (409, _INVALID, "document_not_ready"),
    errors.UnknownKey: (404, _INVALID, "key_not_found"),
    errors.BadRequest: (400, _INVALID, None),
    errors.Unauthorized: (401, "authentication_error", "invalid_api_key"),
    errors.Forbidden: (403, _INVALID, "missing_scope"),
    errors.TooManyRequests: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Overloaded: (503, _SERVER, "overloaded"),
    errors.LeaseNotFound: (503, _SERVER, "lease_lost"),
    errors.DrafterHangs: (503, _SERVER, "drafter_unavailable"),
    errors.DrafterUnavailable: (503, _SERVER, "drafter_unavailable"),
    errors.RetrievalUnavailable: (503, _SERVER, "retrieval_unavailable"),
    errors.TargetUnavailable: (503, _SERVER, "target_unavailable"),
    errors.OrchestratorLost: (503, _SERVER, "orchestrator_lost"),
    errors.CannotContinue: (503, _SERVER, "cannot_continue"),
    errors.DeadlinePassed: (504, _SERVER, "deadline_passed"),
    errors.EngineFailed: (500, _SERVER, "engine_failed"),
    errors.OutOfStep: (500, _SERVER, "engine_failed"),
    errors.ConfigurationError: (500, _SERVER, "configuration_error"),
    errors.LibraryFull: (507, _SERVER, "library_full"),
    errors.LibraryUnavailable: (503, _SERVER, "library_unavailable"),
    errors.RapidError: (503, _SERVER, None),
}
_BUG = (500, _SERVER, "internal_error")
_RETRY_AFTER_S = 1.0  # for errors that name no time
_MISTAKE = "The server made a mistake; its log says which, under this response's x-request-id."


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error response.

    Attributes:
        status: The HTTP status.
        body: The JSON body.
        headers: The headers that belong to the error.
    """

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def http_error(error: BaseException) -> HttpError:
    """Translate `error`.

    An error of status 500, such as any that the table does not list, is a bug: the response says
    that it happened but not its message, which may hold paths or another client's text. The body
    marks errors of status 408, 429 and 503 as retryable; a bug would only happen again.
    """
    status, kind, code = next((_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE), _BUG)
    message = _MISTAKE if status == 500 else str(error)
    headers: dict[str, str] = {}
    if is_retryable := status in (408, 429, 503):
        wait_s = getattr(error, "retry_after_s", None) or _RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    if status == 504:
        headers["x-should-retry"] = "false"  # OpenAI's SDKs would send it again
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    param = getattr(error, "param", None)
    if isinstance(error, errors.RapidError):  # others have codes of their own libraries
        code = getattr(error, "code", None) or code
    body = error_body(message, kind, param, code, is_retryable=is_retryable)
    return HttpError(status, body, headers)


def error_body(
    message: str,
    kind: str = _INVALID,
    param: str | None = None,
    code: str | None = None,
    *,
    is_retryable: bool = False,
) -> dict[str, Any]:
    """Return OpenAI's error body, plus whether the same request may succeed when sent again."""
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
            "retryable": is_retryable,
        }
    }
