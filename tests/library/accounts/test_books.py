"""Usage that is written once, limits that are read again, and a database that goes away."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from sqlalchemy import delete

from library.accounts import books
from library.accounts.api_keys import create_key
from library.accounts.books import Accounts
from library.accounts.tenant_limits import read_limits, write_limits
from library.accounts.usage_ledger import AGAIN, UsageEntry, record_usage, sum_usage
from library.storage.database import Database
from library.storage.schema import UsageRow
from rapid.errors import LibraryUnavailable

ENTRY = UsageEntry("r1", "acme", "key_1", "m", "2026-01-31", 100, 40, 8, 0.5, 0.25, 9e6, "ok")


def accounts_in(database: Database) -> Accounts:
    async def get() -> Database:
        return database

    return Accounts(get)


async def totals(database: Database, *by: str) -> list[dict[str, object]]:
    return await sum_usage(database, None, "2026-01-01", "2026-12-31", by or ["day"])  # type: ignore[arg-type]


async def test_an_answer_is_counted_once_however_often_it_is_written(database: Database):
    part = replace(ENTRY, prompt_tokens=0, completion_tokens=3, target_s=0.1, status="left")
    written = [part, ENTRY, part, ENTRY, replace(ENTRY, request_id="r2", key_id="key_2")]
    random.Random(1).shuffle(written)
    await asyncio.gather(*(record_usage(database, [each]) for each in written))
    await record_usage(database, written)
    assert await totals(database) == [
        {
            "day": "2026-01-31",
            "num_requests": 2,
            "prompt_tokens": 200,
            "cached_tokens": 80,
            "completion_tokens": 16,
            "target_s": 1.0,
            "drafter_s": 0.5,
            "kv_byte_s": 18e6,
        }
    ]
    by_key = await totals(database, "tenant", "key_id")
    assert [(each["key_id"], each["prompt_tokens"]) for each in by_key] == [
        ("key_1", 100),
        ("key_2", 100),
    ]


async def test_the_end_of_an_answer_stays(database: Database):
    """Whatever comes before or after it, and of beginnings the longest."""
    left = replace(ENTRY, prompt_tokens=500, completion_tokens=2, status="left")
    longer = replace(left, completion_tokens=5)
    failed = replace(ENTRY, prompt_tokens=0, completion_tokens=0, status="failed")
    for order, expected in (
        ((failed, left, longer, left), (500, 5)),
        ((left, ENTRY, longer), (100, 8)),
        ((ENTRY, failed, left), (100, 8)),
    ):
        name = str(order)[-300:]
        for each in order:
            await record_usage(database, [replace(each, request_id=name, day="2026-03-01")])
        (found,) = await sum_usage(database, None, "2026-03-01", "2026-03-01", ["day"])
        assert (found["prompt_tokens"], found["completion_tokens"]) == expected
        async with database.write() as session:
            await session.execute(delete(UsageRow))


@pytest.mark.parametrize("is_end_first", [True, False])
async def test_what_resuming_took_is_added_and_is_no_request(
    database: Database, is_end_first: bool
):
    none = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
    end = replace(ENTRY, target_s=0.0, drafter_s=0.0, kv_byte_s=0.0)
    again = replace(ENTRY, request_id="r1+1", status=AGAIN, **none)
    entries = [end, replace(ENTRY, status="left"), again]
    for each in entries if is_end_first else reversed(entries):
        await record_usage(database, [each])
    (found,) = await totals(database)
    assert (found["num_requests"], found["prompt_tokens"]) == (1, 100)
    assert (found["target_s"], found["kv_byte_s"]) == (2 * 0.5, 2 * 9e6)


async def test_sums_are_of_a_tenant_and_of_days(database: Database):
    days = [replace(ENTRY, request_id=f"r{n}", day=f"2026-02-{n:02}") for n in range(1, 10)]
    await record_usage(database, [*days, replace(ENTRY, request_id="other", tenant="guest")])
    found = await sum_usage(database, "acme", "2026-02-03", "2026-02-05", ["day", "model"])
    assert [each["day"] for each in found] == ["2026-02-03", "2026-02-04", "2026-02-05"]
    assert await sum_usage(database, "nobody", "2026-01-01", "2026-12-31", ["day"]) == []


async def test_limits_that_change_are_read_again(database: Database):
    accounts = accounts_in(database)
    assert not await accounts.read_limits()
    await asyncio.gather(
        *(write_limits(database, "acme", {"files": n}, actor="ops") for n in (1, 2, 3))
    )
    await write_limits(database, "acme", {"weight": 5, "files": 7}, actor="ops")
    assert await accounts.read_limits()
    assert not await accounts.read_limits()
    await write_limits(database, "acme", {"files": None}, actor="ops")
    assert await accounts.read_limits()
    assert (accounts.limits["acme"].weight, accounts.limits["acme"].files) == (5, None)
    assert [each.tenant for each in await read_limits(database)] == ["acme"]


async def test_usage_is_written_within_a_turn_and_at_the_end(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(books, "_TURN_S", 0.01)
    accounts, changes = accounts_in(database), list[int]()
    await write_limits(database, "acme", {"weight": 2}, actor="ops")
    async with accounts.keep(lambda: changes.append(1)):
        accounts.note(ENTRY)
        async with asyncio.timeout(60):
            while not await totals(database):  # noqa: ASYNC110 (it is the product that polls)
                await asyncio.sleep(0.01)
        monkeypatch.setattr(books, "_TURN_S", 1000)
        await asyncio.sleep(0.05)
        accounts.note(replace(ENTRY, request_id="r2"))
    assert (await totals(database))[0]["num_requests"] == 2
    assert (changes, accounts.num_lost) == ([1], 0)


async def test_the_first_key_is_told_of_once(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(books, "_TURN_S", 0.01)
    accounts, told = accounts_in(database), asyncio.Event()
    async with accounts.keep(told.set), asyncio.timeout(60):
        await asyncio.sleep(0.05)
        assert not told.is_set()
        assert not accounts.knows_keys
        await create_key(database, "acme", "first", ["ask"], None, actor="ops")
        await told.wait()
        assert accounts.knows_keys
        told.clear()
        await create_key(database, "acme", "second", ["ask"], None, actor="ops")
        await asyncio.sleep(0.05)
        assert not told.is_set()


async def test_what_a_database_that_is_away_keeps_from_being_written_waits_or_is_counted(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    is_away = True

    async def get() -> Database:
        if is_away:
            raise LibraryUnavailable("Away.")
        return database

    monkeypatch.setattr(books, "_MOST_WAITING", 3)
    accounts = Accounts(get)
    for number in range(5):
        accounts.note(replace(ENTRY, request_id=str(number)))
    with pytest.raises(LibraryUnavailable):
        await accounts.write_usage()
    is_away = False
    await accounts.write_usage()
    assert (await totals(database))[0]["num_requests"] == 3
    is_away = True
    async with accounts.keep(lambda: None):
        accounts.note(ENTRY)
    assert accounts.num_lost == 3
    assert "the usage of 3 answers was not written so far" in caplog.text
