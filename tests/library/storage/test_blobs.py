"""Blobs in a folder and in S3, and an S3 server that is away."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from library.ingestion import Ingestion
from library.library_access import Library
from library.library_config import LibraryConfig
from library.storage import blobs as blobs_module
from library.storage.blobs import Blobs
from library.storage.database import Database
from library.upkeep import verify
from rapid.errors import LibraryUnavailable
from tests.library.libraries import FakeIndex
from tests.library.object_store import ObjectStore


@pytest.fixture(params=["folder", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "folder":
        return Blobs.in_folder(tmp_path)
    s3: ObjectStore = request.getfixturevalue("s3")
    return Blobs.at(f"{s3.url}/{secrets.token_hex(4)}")


async def test_what_is_put_is_read_listed_and_deleted(blobs: Blobs):
    await blobs.put("originals/a", b"first")
    await blobs.put("originals/a", b"again")
    await blobs.put("texts/a", b"")
    assert await blobs.read("originals/a") == b"again"
    assert await blobs.read("texts/a") == b""
    copy = io.BytesIO()
    await blobs.download("originals/a", copy)
    assert copy.read() == b"again"
    assert [each.name for each in await blobs.list_blobs("originals")] == ["originals/a"]
    await blobs.delete(["originals/a", "originals/none"])
    assert [(each.name, each.num_bytes) for each in await blobs.list_blobs("texts")] == [
        ("texts/a", 0)
    ]


async def test_parts_that_a_crash_left_are_listed_and_deleted(tmp_path: Path):
    blobs = Blobs.in_folder(tmp_path)
    for name in ("texts/a", "texts/b", "layouts/a"):
        await blobs.put(name, b"whole")
        (tmp_path / f"{name}#1").write_bytes(b"part")
    parts = {"texts/a#1": 4, "texts/b#1": 4, "texts/a": 5, "texts/b": 5}
    assert {each.name: each.num_bytes for each in await blobs.list_blobs("texts")} == parts
    await blobs.delete(["texts/a", "texts/b#1"])
    left = {f"{place}/{name}" for place, _, names in os.walk(tmp_path) for name in names}
    assert left == {f"{tmp_path}/{each.name}" for each in await blobs.list_blobs()}
    assert {each.rpartition("/")[2] for each in left} == {"b", "a", "a#1"}


async def test_what_is_not_there_is_not_found(blobs: Blobs):
    for reading in (blobs.read("texts/none"), blobs.download("texts/none", io.BytesIO())):
        with pytest.raises(FileNotFoundError):
            await reading
    with pytest.raises(FileNotFoundError):
        [part async for part in blobs.stream("texts/none")]


async def test_long_files_go_and_come_in_parts(blobs: Blobs):
    content = os.urandom(11 * 2**20 + 3)  # S3 takes it in three parts
    file = io.BytesIO(content)
    file.seek(5)
    await blobs.put("originals/long", file)
    parts = [part async for part in blobs.stream("originals/long")]
    assert b"".join(parts) == content
    assert len(parts) > 3


async def test_a_bucket_that_is_not_there_is_no_missing_file(s3: ObjectStore):
    blobs = Blobs.at("s3://nowhere/files")
    for call in (blobs.put("a/b", b"x"), blobs.read("a/b")):
        with pytest.raises(LibraryUnavailable, match="no such bucket"):
            await call
    with pytest.raises(LibraryUnavailable):
        await blobs.list_blobs()


async def test_wrong_credentials_are_told_to_the_log_alone(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-it")
    with pytest.raises(LibraryUnavailable, match="does not answer") as caught:
        await Blobs.at(s3.url).put("a/b", b"x")
    assert "127.0.0.1" not in str(caught.value)
    assert "SignatureDoesNotMatch" in caplog.text


class TestAway:
    @pytest.fixture
    def server(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
        """A server that is not started yet."""
        server = ObjectStore(tmp_path / "s3")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(blobs_module, "_TIMES_AGAIN", 0)
        yield server
        server.kill()

    async def test_nothing_is_changed_and_nothing_lost(self, server: ObjectStore, tmp_path: Path):
        database = Database.in_folder(tmp_path)
        await database.migrate()
        library = Library.over(LibraryConfig(folder=tmp_path), database, Blobs.at(server.url))

        async def add() -> str:
            content = io.BytesIO(b"The key is 7.")
            return (await library.files.add("a", "n.txt", "user_data", content)).id

        now = 0.0
        worker = Ingestion(library, FakeIndex(), clock=lambda: now)
        with pytest.raises(LibraryUnavailable, match="does not answer"):  # at start
            await add()
        server.start()
        file_id = await add()
        now = 4e9
        server.kill()
        for _ in range(8):  # more than a failure of the file itself may take
            await worker.drain()
            now += 60
        assert (await library.files.get("a", file_id)).status == "uploaded"
        with pytest.raises(LibraryUnavailable):
            await add()
        with pytest.raises(LibraryUnavailable):
            await verify(library, repairs=True)
        server.start()
        await worker.drain()
        assert (await library.files.get("a", file_id)).status == "processed"
        assert await verify(library, young_s=0) == []
        await library.delete("a", file_id)
        server.kill()
        await worker.drain()
        server.start()
        now += 60
        await worker.drain()
        assert await library.blobs.list_blobs() == []
        await library.close()
