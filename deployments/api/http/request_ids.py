"""The id of a request, which its response, its log lines and its usage share."""

import secrets

from starlette.requests import Request


def read_request_id(request: Request) -> str:
    """Return the client's id, to be echoed, or a new one; the same for all calls on a request."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get("x-request-id", "")
        is_sane = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
        request.state.request_id = given if is_sane else f"req_{secrets.token_hex(12)}"
    request_id: str = request.state.request_id
    return request_id
