"""A tenant's own limits of files and bytes take the place of the configured ones."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from library.accounts.tenant_limits import write_limits
from library.library_access import Library
from library.library_config import LibraryConfig
from library.storage.database import Database
from rapid.errors import BadRequest


async def test_limits_of_files_and_bytes(tmp_path: Path):
    library = await Library.open(LibraryConfig(folder=tmp_path, max_files=2, max_bytes=100))
    database: Database = library.database

    async def add(tenant: str, num_bytes: int) -> str:
        try:
            await library.files.add(tenant, "a.txt", "user_data", io.BytesIO(b"x" * num_bytes))
        except BadRequest as error:
            return str(error)
        return "kept"

    await write_limits(database, "small", {"files": 1}, actor="ops")
    await write_limits(database, "large", {"files": 9, "bytes": 500}, actor="ops")
    assert [await add("usual", 10) for _ in range(3)][1:] == [
        "kept",
        "You have 2 files, which is the most: delete some.",
    ]
    assert "which is the most" in [await add("small", 1) for _ in range(2)][1]
    assert [await add("large", 200) for _ in range(2)] == ["kept", "kept"]
    assert "over the limit of 500: delete some." in await add("large", 200)
    with pytest.raises(BadRequest, match="over the limit of 100"):
        await library.files.add("other", "a.txt", "user_data", io.BytesIO(b"x" * 101))
    await library.close()
