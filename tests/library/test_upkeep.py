"""What a crash may leave, and what it may not."""

from __future__ import annotations

import asyncio
import io
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import httpx
import pytest
from sqlalchemy import delete

from library.files.stored_files import original_of, text_of
from library.ingestion import Ingestion
from library.library_access import Library
from library.library_config import LibraryConfig
from library.storage.database import Database
from library.storage.schema import FileRow, JobRow
from library.upkeep import Discrepancy, verify
from rapid.documents import name_text
from rapid.errors import DocumentNotReady
from tests.library.conftest import empty
from tests.library.libraries import FakeIndex, FakeTraces
from tests.library.serve_library import start_server
from tests.ports import free_port


async def test_bytes_that_nobody_was_told_of_are_found_and_deleted(library: Library):
    await library.blobs.put("originals/file-unknown", b"half an upload")
    assert await verify(library) == []  # an upload may still be about to be told of
    expected = [Discrepancy("bytes without a file", "originals/file-unknown")]
    assert await verify(library, young_s=0) == expected
    assert await verify(library, young_s=0, repairs=True) == expected
    assert await verify(library, young_s=0) == []


async def test_what_a_crash_left_in_the_folder_is_found_and_goes_with_its_file(tmp_path: Path):
    library = await Library.open(LibraryConfig(folder=tmp_path))
    file = await library.files.add("a", "n.txt", "user_data", io.BytesIO(b"text"))
    part = tmp_path / "files" / f"{original_of(file.id)}#1"
    deletions = (
        partial(verify, library, young_s=0, repairs=True),
        partial(library.deletions.delete_bytes, file.id),
    )
    for delete_it in deletions:
        part.write_bytes(b"te")
        found = await verify(library, young_s=0)
        assert found == [Discrepancy("bytes without a file", f"{original_of(file.id)}#1")]
        await delete_it()
        assert not part.exists()
    await library.close()


async def test_a_file_whose_bytes_are_gone_says_so(library: Library):
    file = await library.files.add("a", "n.txt", "user_data", io.BytesIO(b"text"))
    await Ingestion(library, None).drain()
    await library.blobs.delete([text_of(file.id)])
    assert await verify(library, repairs=True) == [Discrepancy("file without bytes", file.id)]
    with pytest.raises(DocumentNotReady, match="upload it again"):
        await library.documents.find("a", [file.id])
    assert await verify(library) == []


async def test_work_that_nobody_does_is_given_to_somebody(library: Library):
    file = await library.files.add("a", "n.txt", "user_data", io.BytesIO(b"text"))
    store = await library.stores.create("a", file_ids=[file.id])
    async with library.database.write() as session:
        await session.execute(delete(JobRow))
    await Ingestion(library, FakeIndex()).drain()
    assert (await library.files.get("a", file.id)).status == "uploaded"
    assert await verify(library, repairs=True) == 2 * [
        Discrepancy("work that nobody does", file.id)
    ]
    await Ingestion(library, FakeIndex()).drain()
    assert (await library.stores.get_file("a", store.id, file.id)).status == "completed"


async def test_what_is_there_of_a_deleted_text_is_found_and_forgotten_again(library: Library):
    index, traces = FakeIndex(), FakeTraces()

    async def work() -> None:
        await Ingestion(library, index, traces, clock=lambda: time.time() + 1).drain()

    async def add() -> FileRow:
        row = await library.files.add("a", "n.txt", "user_data", io.BytesIO(b"a secret"))
        await work()
        return await library.files.get("a", row.id)

    async def find(texts: Mapping[str, str]) -> list[str]:
        return [each for each in texts if each in traces.texts]

    file = await add()
    name = name_text("a", file.digest or "")
    traces.texts |= {name, "of a request"}  # which is of no file, and no orphan
    places = [("KV", find)]
    assert await verify(library, places) == []
    await library.delete("a", file.id)
    await work()
    assert await verify(library, places) == []
    traces.texts.add(name)  # with a backup of a folder, say
    orphan = [Discrepancy("KV of a deleted text", name)]
    assert await verify(library, places) == orphan
    assert await verify(library, places, repairs=True) == orphan
    assert await verify(library, places, repairs=True) == orphan
    await work()
    assert traces.texts == {"of a request"}
    assert await verify(library, places) == []
    await add()  # once more, before a worker comes to what was found
    traces.texts.add(name)
    async with library.database.write() as session:
        await library.jobs.add(session, "forget", "a", name)
    await work()
    assert name in traces.texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_kills", "num_uploads"), [("folder", 20, 15), ("servers", 8, 13)]
)
async def test_what_was_acknowledged_survives_kills(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, num_kills: int, num_uploads: int
):
    """Killed many times while files come, are read and deleted, in a folder, PostgreSQL or S3."""
    config, kept_in = LibraryConfig(folder=tmp_path), tmp_path / "files"
    if kind == "servers":
        url, s3 = request.getfixturevalue("postgres"), request.getfixturevalue("s3")
        database = Database(url)
        await empty(database)
        await database.close()
        config = LibraryConfig(folder=tmp_path, database=url, blobs=f"{s3.url}/kills")
        kept_in = s3.folder / "library" / "kills"
    rng = random.Random(3)
    kept: dict[str, bytes] = {}
    deleted: set[str] = set()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    for _ in range(num_kills):
        server = await asyncio.to_thread(start_server, config, port)
        num_left = rng.randrange(1, num_uploads)

        def count(server: subprocess.Popen[bytes] = server) -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                server.kill()

        uses = (_use(url, kept, deleted, rng.random(), count) for _ in range(num_uploads))
        await asyncio.gather(*uses)
        server.kill()
        server.wait()
    server = await asyncio.to_thread(start_server, config, port)
    try:
        async with httpx.AsyncClient(base_url=url) as http:
            for file_id, content in kept.items():
                while await _status(http, file_id) == "uploaded":  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                assert await _status(http, file_id) == "processed"
                assert (await http.get(f"/v1/files/{file_id}/content")).content == content
            listed = (await http.get("/v1/files")).json()["data"]
            assert not deleted & {each["id"] for each in listed}
    finally:
        server.kill()
        server.wait()
    assert len(kept) > num_kills * 2
    library = await Library.open(config)
    await Ingestion(library, FakeIndex(), clock=lambda: time.time() + 60).drain()
    orphans = await verify(library, repairs=True, young_s=0)
    assert {each.kind for each in orphans} <= {"bytes without a file"}
    assert await verify(library, young_s=0) == []
    names = {each.name for each in await library.blobs.list_blobs()}
    assert not names & {original_of(each) for each in deleted}
    on_disk = {p.name for p in kept_in.rglob("*") if p.is_file()}
    assert on_disk == {name.partition("/")[2] for name in names}
    await library.close()


async def _status(http: httpx.AsyncClient, file_id: str) -> str:
    return str((await http.get(f"/v1/files/{file_id}")).json()["status"])


async def _use(
    url: str,
    kept: dict[str, bytes],
    deleted: set[str],
    chance: float,
    count: Callable[[], None],
) -> None:
    """Upload a file and perhaps delete it; note and count what the server has acknowledged."""
    content = f"The code is {chance}. ".encode() * 500
    try:
        async with httpx.AsyncClient(base_url=url) as http:
            form = {"purpose": (None, "user_data"), "file": ("n.txt", content)}
            file_id = (await http.post("/v1/files", files=form)).raise_for_status().json()["id"]
            kept[file_id] = content
            count()
            if chance < 0.2:
                del kept[file_id]  # which may happen, acknowledged or not
                (await http.delete(f"/v1/files/{file_id}")).raise_for_status()
                deleted.add(file_id)
    except httpx.HTTPError:
        pass
