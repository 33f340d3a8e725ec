"""Stores that are changed at the same time, and that expire, on both kinds of database."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from library.files.stored_documents import StoredDocuments
from library.files.vector_stores import VectorStores
from library.library_access import Library
from library.library_config import LibraryConfig
from library.storage.blobs import Blobs
from library.storage.database import Database
from library.storage.listing import Cut
from library.upkeep import verify
from rapid.errors import LibraryFull, UnknownDocument


async def attempt(call: Coroutine[Any, Any, Any]) -> None:
    with suppress(UnknownDocument):
        await call


async def test_who_changes_what_another_deletes_finds_it_or_not(database: Database, tmp_path: Path):
    config = LibraryConfig(folder=tmp_path)
    library = Library.over(config, database, Blobs.in_folder(tmp_path / "blobs"))
    files, stores, chance = library.files, library.stores, random.Random(4)
    for _ in range(6):
        ids = [
            (await files.add("a", f"{number}.txt", "user_data", io.BytesIO(b"text"))).id
            for number in range(3)
        ]
        store = (await stores.create("a", file_ids=ids[:1])).id
        batch = (await stores.put_batch("a", store, ids[1:])).id
        calls = [
            *(library.delete("a", each) for each in ids),
            *(stores.put("a", store, [each], {"n": 1}) for each in ids),
            *(stores.change_file("a", store, each, {"n": 2}) for each in ids),
            *(stores.remove_file("a", store, each) for each in ids),
            stores.put_batch("a", store, ids),
            stores.cancel_batch("a", store, batch),
            stores.change("a", store, name="other"),
            stores.delete("a", store),
            stores.delete("a", store),
        ]
        chance.shuffle(calls)

        await asyncio.gather(*(attempt(each) for each in calls))
    assert await verify(library, young_s=-1.0) == []


class TestExpiry:
    async def test_a_store_that_is_asked_every_day_stays(self, library: Library):
        now = 1_800_000_000
        stores = VectorStores(library.database, library.jobs, lambda: now * 10**9)
        documents = StoredDocuments(library.database, library.blobs, library.files, stores)
        asked, searched, left = [
            (await stores.create("a", name, expires_after_days=2)).id for name in "abc"
        ]
        for _ in range(3):
            now += 86_400
            await documents.find("a", store_ids=[asked])  # as a question names it
            await documents.find_in_store("a", searched)
            await stores.delete_expired()
        page = await stores.list_stores("a", Cut())
        assert {each.id: each.last_active_at for each in page.rows} == {asked: now, searched: now}
        with pytest.raises(UnknownDocument):
            await documents.find_in_store("a", left)

    async def test_a_use_is_noted_once_an_hour_and_fails_no_search(
        self, library: Library, monkeypatch: pytest.MonkeyPatch
    ):
        began = now = 1_800_000_000
        stores = VectorStores(library.database, library.jobs, lambda: now * 10**9)
        documents = StoredDocuments(library.database, library.blobs, library.files, stores)
        store = (await stores.create("a")).id
        now += 3_599
        await documents.find_in_store("a", store)
        assert (await stores.get("a", store)).last_active_at == began
        now += 1
        with monkeypatch.context() as patched:
            patched.setattr(library.database, "write", refuse)
            assert await documents.find_in_store("a", store) == []
        await documents.find_in_store("a", store)
        assert (await stores.get("a", store)).last_active_at == now


def refuse() -> Any:
    raise LibraryFull("The disk is full.")
