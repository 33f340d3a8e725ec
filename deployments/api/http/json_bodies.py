"""Bodies that are JSON objects: parsed with bounds, and validated by a model of their fields."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from starlette.requests import Request

from deployments.api.http.bodies import Bodies
from rapid.errors import BadRequest
from rapid.requests.refusing import validate_fields
from rapid.requests.request_fields import Fields

_MAX_STRINGS = 2**17  # 1.3 million keys held the interpreter's lock for 0.7 s
_MAX_ITEMS = 2**20  # eight million token ids held the interpreter's lock for more than a second
_MAX_BRACKETS = 2**19  # six million empty objects held the interpreter's lock for 0.75 s

_SHORT_BODY = 256 * 1024  # about a millisecond
# What may have to be compiled, for half a second; a name could be written with escapes.
_TO_COMPILE = re.compile(rb'"(?:response_format|structured_outputs|guided_|tools)|\\u')

_NUM_THREADS = 16  # bodies with grammars that are parsed at once

Made = TypeVar("Made")
Body = TypeVar("Body", bound=Fields)


async def read_fields(bodies: Bodies, request: Request, schema: type[Body]) -> Body:
    """Return the body of a caller's request; an empty one has no fields.

    Raises:
        BadRequest: It is invalid; the first invalid field is named. Errors of `Bodies.body`, too.
    """
    async with bodies.body(request, request.state.caller, ("application/json",)) as body:
        return await asyncio.to_thread(lambda: validate_fields(schema, parse_object(body or b"{}")))


async def parse_aside(parse: Callable[..., Made], body: bytes, *more: object) -> Made:
    """Return what `parse` makes of a body; one that may take long is parsed in a thread."""
    if _TO_COMPILE.search(body):
        return await asyncio.get_running_loop().run_in_executor(_open_threads(), parse, body, *more)
    if len(body) <= _SHORT_BODY:
        return parse(body, *more)
    return await asyncio.to_thread(parse, body, *more)


@cache
def _open_threads() -> ThreadPoolExecutor:
    """Return threads that wait for one process, so that nothing else waits behind them."""
    return ThreadPoolExecutor(_NUM_THREADS, "rapid-grammars")


class ParsedBody(bytes):
    """A body with its fields, which are parsed once.

    Attributes:
        fields: What `parse_object` returns of it.
    """

    fields: dict[str, Any]


async def read_priority(body: bytes) -> tuple[int, bytes]:
    """Return the ``priority`` of a body that has a valid one, or 0, and the body.

    It is known before the body is read as a question, which a request does that has a place.
    """
    if b'"priority"' not in body:
        return 0, body
    try:
        fields = await parse_aside(parse_object, body)
    except BadRequest:  # of which the question will tell
        return 0, body
    parsed = ParsedBody(body)
    parsed.fields = fields
    priority = fields.get("priority")
    return priority if isinstance(priority, int) else 0, parsed


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode a body that is an object; what can be counted is counted before it is parsed.

    Strings, items and brackets are counted because a parser holds the interpreter's lock, in any
    thread: a million keys would hold it for a second. Quotes within a text are escaped and do not
    count, nor do its commas; brackets do. NaN and Infinity are left to validation, whose errors
    name the field.

    Raises:
        BadRequest: It is no JSON object, or has too much in it.
    """
    if isinstance(body, ParsedBody):
        return body.fields
    plain = body.replace(rb"\\", b"")  # so that only a quote is escaped by what is left
    num_strings = (plain.count(b'"') - plain.count(b'\\"')) // 2
    num_items = 0
    if num_strings <= _MAX_STRINGS:  # else there are too many parts between them
        num_items = sum(part.count(b",") for part in plain.replace(b'\\"', b"").split(b'"')[::2])
    num_brackets = body.count(b"{") + body.count(b"[")
    for number, most, what in (
        (num_strings, _MAX_STRINGS, "strings"),
        (num_items, _MAX_ITEMS, "items of lists and objects"),
        (num_brackets, _MAX_BRACKETS, "opening brackets"),
    ):
        if number > most:
            raise BadRequest(
                f"The request body has {number} {what}, and this server takes {most} at most."
            )
    try:
        fields = json.loads(body.decode("utf-8-sig"))  # some texts begin with a byte order mark
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"The request body is not UTF-8 (byte {error.start}): encode it before sending."
        ) from None
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"The request body is not JSON: {error}") from None
    except ValueError:
        raise BadRequest("The request body has a number of too many digits.") from None
    if not isinstance(fields, dict):
        raise BadRequest("The request body must be a JSON object.")
    return fields
