"""Reading of request bodies, up to a limit."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request

from rapid.errors import BadRequest, BodyTooLarge

_DRAINED_BODIES = 4


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Read the body, and drop it as soon as it is longer than `max_bytes`.

    Raises:
        BadRequest: If the media type is not JSON.
        BodyTooLarge: If the body is longer than `max_bytes`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BadRequest("Send the body with 'Content-Type: application/json'.")
    declared = request.headers.get("content-length", "0")
    too_long = declared.isdecimal() and int(declared) > max_bytes
    num_bytes = 0
    parts: list[bytes] = []
    stream = request.stream()
    async for part in stream:
        num_bytes += len(part)
        too_long = too_long or num_bytes > max_bytes
        if too_long:
            await drop(stream, max_bytes)
            break
        parts.append(part)
    if too_long:
        raise BodyTooLarge(f"The request body is over the limit of {max_bytes} bytes.")
    return b"".join(parts)


async def drop(stream: AsyncIterator[bytes], max_bytes: int) -> None:
    """Read what is left of a body and drop it, up to `_DRAINED_BODIES` times `max_bytes`.

    A client that is cut off while it sends would see a broken connection instead of the error.
    """
    num_bytes = 0
    async for part in stream:
        num_bytes += len(part)
        if num_bytes > _DRAINED_BODIES * max_bytes:
            return
