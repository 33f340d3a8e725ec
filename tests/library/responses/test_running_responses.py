"""Responses that are being answered, on both kinds of database."""

from __future__ import annotations

from typing import Any

import pytest

from library.responses.conversations import Conversations
from library.responses.kept_responses import KeptResponses
from library.responses.running_responses import LEASE_S, Growth, RunningResponses
from library.storage.database import Database
from rapid.errors import BadRequest, UnknownDocument

NS = 10**9


class Clock:
    now_s = 1000.0

    def __call__(self) -> int:
        return int(self.now_s * NS)


class Process:
    """A process that answers responses of one database."""

    def __init__(self, database: Database, clock: Clock) -> None:
        conversations = Conversations(database, max_bytes=10**9)
        self.kept = KeptResponses(database, conversations, clock)
        self.running = RunningResponses(database, conversations, self.kept, clock)

    async def begin(self, name: str) -> None:
        await self.running.begin("a", said(name, "queued"), [], {})

    async def read(self, name: str) -> tuple[str, str, bool]:
        """Return a response's status, what it says, and whether somebody answers it."""
        row = await self.kept.get("a", name)
        return row.response["status"], "".join(row.response["output"]), bool(row.owner)


def said(name: str, status: str, text: str = "") -> dict[str, Any]:
    response = {"id": name, "previous_response_id": None, "store": True, "conversation": None}
    return response | {"status": status, "output": [text] if text else [], "error": None}


def grown(name: str, status: str, text: str) -> Growth:
    return Growth("a", said(name, status, text), [[0, len(text), 0]])


async def test_one_process_answers_and_all_see_how_far(database: Database):
    clock = Clock()
    ours, theirs = Process(database, clock), Process(database, clock)
    await ours.begin("r")
    assert await theirs.read("r") == ("queued", "", True)
    assert await ours.running.renew(["r"], [grown("r", "in_progress", "He")]) == {"r"}
    assert await theirs.read("r") == ("in_progress", "He", True)
    assert await theirs.kept.find_progress("a", "r") == ("in_progress", 1, True)
    assert await theirs.kept.find_progress("b", "r") is None
    assert await theirs.running.renew(["r"], [grown("r", "in_progress", "No")]) == set()
    assert not await theirs.running.end(grown("r", "completed", "No"))
    with pytest.raises(BadRequest, match="is in_progress: go on from one that is completed"):
        await theirs.kept.read("a", await theirs.kept.list_chain("a", "r", 9))
    assert await ours.running.end(grown("r", "completed", "Hello"))
    assert await theirs.read("r") == ("completed", "Hello", False)
    assert await theirs.kept.find_progress("a", "r") == ("completed", 1, False)
    assert not await ours.running.end(grown("r", "failed", "Hello"))
    assert (await theirs.running.cancel("a", "r")).response["status"] == "completed"


async def test_who_does_not_renew_is_lost_for_good(database: Database):
    clock = Clock()
    ours, theirs = Process(database, clock), Process(database, clock)
    await ours.begin("r")
    clock.now_s += LEASE_S - 0.1
    assert await ours.running.renew(["r"], [grown("r", "in_progress", "He")]) == {"r"}
    clock.now_s += LEASE_S - 0.1
    assert await theirs.read("r") == ("in_progress", "He", True)
    assert await theirs.kept.find_progress("a", "r") == ("in_progress", 1, True)
    assert await theirs.kept.find_progress("b", "r") is None
    clock.now_s += 0.2
    for process in (ours, theirs):
        assert await process.read("r") == ("failed", "He", False)
        assert await process.kept.find_progress("a", "r") == ("in_progress", 1, False)
    assert await ours.running.renew(["r"], [grown("r", "in_progress", "Hell")]) == set()
    assert not await ours.running.end(grown("r", "completed", "Hello"))
    row = await ours.running.cancel("a", "r")
    assert (row.response["status"], row.response["error"]["code"]) == ("failed", "server_error")


async def test_one_that_is_cancelled_or_deleted_is_its_process_no_more(database: Database):
    clock = Clock()
    ours, theirs = Process(database, clock), Process(database, clock)
    await ours.begin("cancelled")
    await ours.begin("deleted")
    await ours.begin("left")
    with pytest.raises(UnknownDocument):
        await theirs.running.cancel("b", "cancelled")
    assert (await theirs.running.cancel("a", "cancelled")).response["status"] == "cancelled"
    await theirs.kept.delete("a", "deleted")
    names = ["cancelled", "deleted", "left"]
    growths = [grown(each, "in_progress", "He") for each in names]
    assert await ours.running.renew(names, growths) == {"left"}
    assert await theirs.read("cancelled") == ("cancelled", "", False)
    for name in ("cancelled", "deleted"):
        assert not await ours.running.end(grown(name, "completed", "Hello"))
