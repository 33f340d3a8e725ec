"""Changes of the same stores and files at the same time, on both kinds of database."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from library.library_access import Library
from library.library_config import LibraryConfig
from library.storage.blobs import Blobs
from library.storage.database import Database
from library.upkeep import verify
from rapid.errors import UnknownDocument


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
