"""Request bodies that arrive in parts."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from deployments.api.bodies import drop, read_json_body
from rapid.errors import BadRequest, BodyTooLarge


class Sender:
    """A client that sends so many parts of ten bytes, and counts those that were taken."""

    def __init__(self, num_parts: int, **headers: str) -> None:
        self.left = num_parts
        self.taken = 0
        given = {"content-type": "application/json"} | headers
        self.scope = {
            "type": "http",
            "headers": [(name.replace("_", "-").encode(), v.encode()) for name, v in given.items()],
        }

    async def receive(self) -> Any:
        self.left -= 1
        self.taken += 1
        return {"type": "http.request", "body": b"x" * 10, "more_body": self.left > 0}

    @property
    def request(self) -> Request:
        return Request(self.scope, self.receive)


async def test_a_body_at_the_limit_is_returned_whole() -> None:
    assert await read_json_body(Sender(3).request, 30) == b"x" * 30


@pytest.mark.parametrize(
    ("sender", "num_taken"),
    [
        (Sender(4), 4),
        (Sender(1_000), 17),  # it is cut off after four times the limit
        (Sender(4, content_length="40"), 4),
    ],
)
async def test_a_long_body_is_read_on_for_a_while_and_refused(
    sender: Sender, num_taken: int
) -> None:
    with pytest.raises(BodyTooLarge, match="limit of 30 bytes"):
        await read_json_body(sender.request, 30)
    assert sender.taken == num_taken


async def test_a_body_that_nobody_wants_is_read_to_its_end() -> None:
    sender = Sender(5)
    await drop(sender.request.stream(), 30)
    assert sender.taken == 5


async def test_another_media_type_is_not_read() -> None:
    sender = Sender(5, **{"content-type": "text/plain"})
    with pytest.raises(BadRequest, match="Content-Type"):
        await read_json_body(sender.request, 30)
    assert sender.taken == 0
