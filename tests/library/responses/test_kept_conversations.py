"""Responses and conversations on both kinds of database."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from library.responses.conversations import Conversations
from library.responses.kept_responses import KeptResponses
from library.storage.database import Database
from library.storage.listing import Cut
from library.storage.schema import ConversationRow
from rapid.errors import BadRequest, UnknownDocument

DAY_NS = 86_400 * 10**9


def say(name: str, text: str = "Hi") -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"id": name, "type": "message", "role": "user", "content": content}


async def keep(kept: KeptResponses, name: str, before: str | None, text: str = "Hi") -> None:
    response: dict[str, Any] = {"id": name, "previous_response_id": before, "store": True}
    response |= {"status": "completed"}
    response |= {"output": [say(f"{name}-out", text)], "conversation": None}
    await kept.keep("a", response, [say(f"{name}-in", text)], [[0, 2, 0]], {"file_ids": ["f"]})


async def test_a_chain_is_found_oldest_first(database: Database):
    kept = KeptResponses(database, Conversations(database, max_bytes=10**9))
    for number in range(5):
        await keep(kept, str(number), str(number - 1) if number else None)
    await keep(kept, "branch", "1")
    assert [row.id for row in await kept.list_chain("a", "4", 9)] == ["0", "1", "2", "3", "4"]
    assert [row.id for row in await kept.list_chain("a", "branch", 9)] == ["0", "1", "branch"]
    assert [row.id for row in await kept.list_chain("a", "4", 2)] == ["3", "4"]
    (said,) = await kept.read("a", await kept.list_chain("a", "0", 1))
    assert said == ("0", [say("0-in"), say("0-out")], {"file_ids": ["f"]})
    await kept.delete("a", "2")
    for tenant, name in (("a", "4"), ("b", "0"), ("a", "none")):
        with pytest.raises(UnknownDocument):
            await kept.list_chain(tenant, name, 9)


async def test_a_response_is_kept_for_thirty_days(database: Database):
    now = 0
    kept = KeptResponses(database, Conversations(database, max_bytes=10**9), clock_ns=lambda: now)
    await keep(kept, "old", None)
    now = 30 * DAY_NS - 1
    assert (await kept.get("a", "old")).id == "old"
    now += 1
    with pytest.raises(UnknownDocument):  # also before it is swept
        await kept.get("a", "old")
    await keep(kept, "new", None)
    await kept.delete_expired(now / 10**9)
    now = 0
    with pytest.raises(UnknownDocument):
        await kept.get("a", "old")
    assert (await kept.get("a", "new")).id == "new"


async def test_a_chain_is_kept_for_as_long_as_its_last_response(database: Database):
    now = 0
    conversations = Conversations(database, max_bytes=10**9)
    kept = KeptResponses(database, conversations, clock_ns=lambda: now)
    for number in range(3):
        await keep(kept, str(number), str(number - 1) if number else None)
        now += 20 * DAY_NS
    now += 10 * DAY_NS - 1
    await kept.delete_expired(now / 10**9 - 1)
    assert [row.id for row in await kept.list_chain("a", "2", 9)] == ["0", "1", "2"]
    now += 2 * DAY_NS
    with pytest.raises(UnknownDocument):  # also before it is swept
        await kept.list_chain("a", "1", 9)


async def test_long_responses_are_read_a_few_at_a_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("library.responses.kept_responses._PART_BYTES", 1500)
    kept = KeptResponses(database, Conversations(database, max_bytes=10**9))
    for number in range(3):
        await keep(kept, str(number), str(number - 1) if number else None, "x" * 200)
    links = await kept.list_chain("a", "2", 9)
    assert [each.id for each in await kept.read("a", links)] == ["0", "1"]


async def test_a_tenant_keeps_no_more_than_its_bytes(database: Database):
    conversations = Conversations(database, max_bytes=40_000)  # a conversation takes 16,384
    kept = KeptResponses(database, conversations)
    row = await conversations.create("a", {}, [say("1", "x" * 9000)])
    await keep(kept, "kept", None, "x" * 5000)
    with pytest.raises(BadRequest, match="limit of 40000") as refused:
        await keep(kept, "refused", None, "x" * 5000)
    assert (refused.value.param, refused.value.code) == ("store", "quota")
    with pytest.raises(BadRequest, match="limit of 40000"):
        await conversations.add("a", row.id, [say("2", "x" * 9000)])
    with pytest.raises(BadRequest, match="limit of 40000"):
        await conversations.create("a", {}, [])
    await conversations.create("b", {}, [])
    await kept.delete("a", "kept")
    await conversations.add("a", row.id, [say("2", "x" * 9000)])


async def test_a_conversation_has_a_most_and_long_items_make_short_pages(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    for name, most in (("_MOST_ITEM_BYTES", 1000), ("_MOST_BYTES", 3000), ("_PAGE_BYTES", 1500)):
        monkeypatch.setattr(f"library.responses.conversations.{name}", most)
    conversations = Conversations(database, max_bytes=10**9)
    row = await conversations.create("a", {}, [say(name, "x" * 500) for name in "123"])
    page = await conversations.list_items("a", row.id, Cut(order="asc"))
    assert [(each.id, each.item) for each in page.rows] == [
        (name, say(name, "x" * 500)) for name in "12"
    ]
    assert page.has_more
    page = await conversations.list_items("a", row.id, Cut(order="asc", after="2"))
    assert ([each.id for each in page.rows], page.has_more) == (["3"], False)
    for items, param in (
        ([say("4"), say("5", "x" * 1000)], "items[1]"),
        ([say(name, "x" * 500) for name in "456"], "items"),
    ):
        with pytest.raises(BadRequest) as refused:
            await conversations.add("a", row.id, items)
        assert (refused.value.param, refused.value.code) == (param, "quota")


async def test_a_deleted_response_leaves_no_text(database: Database):
    kept = KeptResponses(database, Conversations(database, max_bytes=10**9))
    await keep(kept, "1", None, "quillwort")
    await kept.delete("a", "1")
    assert (await database.forget_deleted("quillwort"))[1]


async def test_items_of_many_are_all_kept_or_gone_with_their_conversation(database: Database):
    conversations = Conversations(database, max_bytes=10**9)
    kept = KeptResponses(database, conversations)
    for is_deleted in (False, True):
        row = await conversations.create("a", {}, [say("first")])

        async def add(name: str, conversation_id: str = row.id) -> None:
            with suppress(UnknownDocument):
                await conversations.add("a", conversation_id, [say(name), say("both")])

        async def answer(name: str, conversation_id: str = row.id) -> None:
            response = {"id": name, "store": False, "output": [say(name)]}
            named = {"conversation": {"id": conversation_id}}
            await kept.keep("a", response | named, [], [], {})

        calls = [*(add(str(each)) for each in range(4)), *(answer(f"r{each}") for each in range(4))]
        if is_deleted:
            calls.insert(4, conversations.delete("a", row.id))
        await asyncio.gather(*calls)
        if is_deleted:
            with pytest.raises(UnknownDocument):
                await conversations.list_items("a", row.id, Cut())
        else:
            page = await conversations.list_items("a", row.id, Cut(order="asc"))
            ids = [each.id for each in page.rows]
            assert ids[0] == "first"
            assert sorted(ids[1:]) == sorted([*"0123", "both", "r0", "r1", "r2", "r3"])


async def test_changing_what_is_being_deleted_finds_it_whole_or_not_at_all(database: Database):
    conversations = Conversations(database, max_bytes=10**9)
    for _ in range(20):
        row = await conversations.create("a", {}, [say("first")])
        changes = [conversations.change("a", row.id, {"turn": str(each)}) for each in range(4)]
        calls = [*changes[:2], conversations.delete("a", row.id), *changes[2:]]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(
            isinstance(each, ConversationRow | UnknownDocument | None) for each in outcomes
        ), outcomes
        with pytest.raises(UnknownDocument):
            await conversations.get("a", row.id)
