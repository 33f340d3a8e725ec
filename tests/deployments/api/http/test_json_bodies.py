"""Bodies that are JSON objects."""

from __future__ import annotations

import threading
from typing import Annotated, Any
from unittest.mock import AsyncMock

import pytest
from pydantic import BeforeValidator
from starlette.requests import Request

from deployments.api.gate.admission import Admission
from deployments.api.http import json_bodies
from deployments.api.http.bodies import Bodies
from deployments.api.http.json_bodies import (
    parse_aside,
    parse_object,
    read_fields,
    read_priority,
)
from rapid.errors import BadRequest
from rapid.requests.request_fields import Fields


def test_items_are_counted_before_they_are_parsed() -> None:
    with pytest.raises(BadRequest, match=r"1048577 items .* takes 1048576 at most"):
        parse_object(b'{"tokens": [' + b"7," * 2**20 + b'7], "a": 1}')


def test_commas_within_texts_are_no_items() -> None:
    text = ',"' * 2**17 + "," * 2**20
    body = ('{"prompt": "' + text.replace('"', r"\\\"") + '\\\\", "n": 1}').encode()
    assert parse_object(body)["n"] == 1


async def test_a_body_with_a_priority_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    priority, body = await read_priority(b'{"priority": -3, "n": 1}')
    monkeypatch.setattr(json_bodies, "json", None)
    assert (priority, parse_object(body), bytes(body)) == (
        -3,
        {"priority": -3, "n": 1},
        b'{"priority": -3, "n": 1}',
    )
    for other in (b'{"n": "priority"}', b'{"priority": '):
        monkeypatch.undo()
        assert await read_priority(other) == (0, other)


@pytest.mark.parametrize(
    ("body", "is_aside"),
    [
        (b'{"messages": []}', False),
        (b'{"response_format": {}}', True),
        (b'{"guided_regex": "a"}', True),
        (b'{"t\\u006fols": []}', True),
        (b'{"a": "' + b"a" * 2**18 + b'"}', True),
    ],
)
async def test_what_may_be_compiled_is_parsed_beside_the_loop(body: bytes, is_aside: bool) -> None:
    thread = await parse_aside(lambda _: threading.get_ident(), body)
    assert (thread != threading.get_ident()) == is_aside


async def test_bodies_are_validated_beside_the_loop() -> None:
    class Looking(Fields):
        thread: Annotated[Any, BeforeValidator(lambda _: threading.get_ident())]

    admission = Admission()
    admission.limit(1, 1)
    bodies = Bodies(admission)
    bodies.limit(100, 1)
    sent = {"type": "http.request", "body": b'{"thread": 0}'}
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    request = Request(scope, AsyncMock(return_value=sent))
    request.state.caller = "local"
    assert (await read_fields(bodies, request, Looking)).thread != threading.get_ident()
