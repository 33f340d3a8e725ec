"""A deletion is complete when nothing is left, and says where it has looked."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from library.files.deletions import name_deletion
from library.ingestion import Ingestion
from library.jobs import LEASE_S, Jobs
from library.library_access import Library, LibraryAccess
from library.library_config import LibraryConfig
from library.storage.blobs import Blobs
from library.storage.database import Database
from library.storage.schema import FileRow
from rapid.documents import forget_text, name_text
from rapid.errors import Overloaded, PromptTooLong, RetrievalUnavailable
from tests.library.libraries import FakeIndex, FakeReader, FakeTraces
from tests.library.test_ingestion import holds

SECRET = b"The secret of door 7 is a plum."


@pytest.fixture
def library(database: Database, tmp_path: Path) -> Library:
    blobs = Blobs.in_folder(tmp_path / "files")
    return Library.over(LibraryConfig(folder=tmp_path), database, blobs)


class World:
    """A library whose worker's clock goes on when it is told to."""

    def __init__(self, library: Library) -> None:
        self.library, self.traces, self.index = library, FakeTraces(), FakeIndex()
        self.reader = FakeReader()
        self.now = time.time() + 1
        self.worker = Ingestion(
            library, self.index, self.traces, self.reader, clock=lambda: self.now
        )

    async def add(self, name: str = "notes.txt", *, prefills: bool = False) -> FileRow:
        row = await self.library.files.add(
            "a", name, "user_data", io.BytesIO(SECRET), prefills=prefills
        )
        await self.work()
        row = await self.library.files.get("a", row.id)
        assert row.digest is not None
        self.traces.texts.add(name_text("a", row.digest))
        return row

    async def work(self, seconds: float = 0.0) -> None:
        self.now = max(self.now + seconds, time.time() + 1)  # what was just asked for is due
        await self.worker.drain()

    async def state(self, file_id: str) -> tuple[bool, dict[str, int], dict[str, str]]:
        """Whether all is gone, what was removed by place, and what is pending."""
        row = await self.library.deletions.find("a", file_id)
        assert row is not None
        removed = {each["place"]: each["num_found"] for each in row.erasures}
        pending = {each["place"]: each["pending"] for each in row.erasures if each["pending"]}
        return row.ended_at is not None, removed, pending


@pytest.fixture
def world(library: Library) -> World:
    return World(library)


async def test_the_certificate_names_every_place(world: World, tmp_path: Path):
    file = await world.add()
    await world.library.delete("a", file.id)
    assert await world.state(file.id) == (False, {}, {})
    await world.work()
    is_gone, removed, pending = await world.state(file.id)
    assert is_gone
    assert not pending
    assert removed["files"] == 3
    assert removed["engine: memory"] == 1
    row = await world.library.deletions.find("a", file.id)
    assert row is not None
    (of_database,) = [each for each in row.erasures if each["place"].startswith("database")]
    assert of_database["num_bytes"] > 2**13  # of a dozen tables
    assert not world.traces.texts
    assert not holds(tmp_path, SECRET)
    assert not holds(tmp_path, file.id.encode())
    assert await world.library.deletions.find("b", file.id) is None


async def test_what_is_in_use_is_pending_until_it_is_not(world: World):
    file = await world.add()
    world.traces.in_use.add(name_text("a", file.digest or ""))
    await world.library.delete("a", file.id)
    await world.work()
    is_gone, _, pending = await world.state(file.id)
    assert not is_gone
    assert pending == {"engine: memory": "in use"}
    await world.work(10)
    assert not (await world.state(file.id))[0]
    world.traces.in_use.clear()
    await world.work(60)
    is_gone, removed, pending = await world.state(file.id)
    assert is_gone
    assert not pending
    assert (removed["files"], removed["engine: memory"]) == (3, 1)


async def test_a_retriever_that_is_away_holds_nothing_else_up(world: World):
    file = await world.add()
    world.index.failure = RetrievalUnavailable("away")
    await world.library.delete("a", file.id)
    await world.work()
    assert (await world.state(file.id))[2] == {"passages": "the retriever is away"}
    assert not world.traces.texts
    world.index.failure = None
    await world.work(60)
    assert (await world.state(file.id))[0]


async def test_a_text_that_another_file_has_stays(world: World):
    first, second = await world.add(), await world.add("copy.txt")
    await world.library.delete("a", first.id)
    await world.work()
    assert (await world.state(first.id))[0]
    assert world.traces.texts
    await world.library.delete("a", second.id)
    await world.work()
    assert not world.traces.texts


async def test_a_worker_that_dies_after_the_row_is_gone_leaves_no_lie(world: World):
    file = await world.add()
    await world.library.delete("a", file.id)
    world.now = time.time() + 1
    jobs = Jobs(world.library.database, lambda: world.now)
    job = await jobs.claim("dead")
    assert job is not None
    await world.library.deletions.note(
        file.id, [await world.library.deletions.delete_bytes(file.id)]
    )
    assert await world.library.deletions.delete_rows(job)
    assert not (await world.state(file.id))[0]
    await world.work(LEASE_S + 1)
    assert (await world.state(file.id))[0]
    assert await jobs.claim("next") is None


async def test_work_on_a_file_in_progress_is_waited_for(world: World):
    row = await world.library.files.add("a", "n.txt", "user_data", io.BytesIO(SECRET))
    world.now = time.time() + 1
    jobs = Jobs(world.library.database, lambda: world.now)
    reading = await jobs.claim("reader")
    assert reading is not None
    await world.library.delete("a", row.id)
    await world.work()
    assert (await world.state(row.id))[2] == {"work": "in progress"}
    await world.work(LEASE_S + 10)
    assert (await world.state(row.id))[0]
    assert await world.library.blobs.list_blobs() == []


async def test_engines_that_start_later_are_told_of_texts_that_nobody_has(world: World):
    first = await world.add()
    await world.library.delete("a", first.id)
    await world.work()
    name = name_text("a", first.digest or "")
    assert await world.library.deletions.list_texts() == {name: "a"}
    await world.add()  # once more
    assert await world.library.deletions.list_texts() == {}


async def test_an_old_certificate_is_dropped(world: World):
    file = await world.add()
    await world.library.delete("a", file.id)
    await world.work()
    await world.library.deletions.drop_old()
    assert await world.library.deletions.find("a", file.id) is not None
    world.library.deletions._clock = lambda: time.time() + 400 * 86_400
    await world.library.deletions.drop_old()
    assert await world.library.deletions.find("a", file.id) is None


def test_a_certificate_is_found_by_a_hash_alone():
    assert "file-1" not in name_deletion("file-1")
    assert name_deletion(name_deletion("file-1")) == name_deletion("file-1")


class TestTexts:
    async def test_a_process_drops_a_text_that_no_request_has(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        # Those that other tests have opened keep texts as well.
        monkeypatch.setattr("rapid.documents._KEEPERS", WeakSet())
        access = LibraryAccess(LibraryConfig(folder=tmp_path))
        library = await access.get()
        world = World(library)
        file = await world.add()
        (found,) = await library.documents.find("a", [file.id])
        await access.resolve("a", [found.ref])
        async with access.hold("a", [found.ref]):
            assert forget_text(None, name_text("a", found.ref.digest)).pending == "in use"
            assert forget_text(None, name_text("b", found.ref.digest)).num_found == 0
        erasure = forget_text(None, name_text("a", found.ref.digest))
        assert (erasure.num_bytes, erasure.num_found, erasure.pending) == (len(SECRET), 1, None)
        assert forget_text(None, name_text("a", found.ref.digest)).num_found == 0
        await library.close()


class TestPrefill:
    async def test_a_target_reads_a_file_once_it_is_read(self, world: World):
        file = await world.add(prefills=True)
        assert file.prefill == "done"
        assert [each.digest for _, each in world.reader.read] == [file.digest]
        assert world.index.documents  # so that the first question waits for no passages

    async def test_a_file_too_long_says_so(self, world: World):
        world.reader.failure = PromptTooLong("it has 9,000 tokens")
        assert (await world.add(prefills=True)).prefill == "failed: it has 9,000 tokens"

    async def test_while_others_wait_it_waits(self, world: World):
        world.reader.failure = Overloaded("busy")
        file = await world.add(prefills=True)
        for _ in range(8):
            await world.work(30)
        assert (await world.library.files.get("a", file.id)).prefill == "queued"
        world.reader.failure = None
        await world.work(30)
        assert (await world.library.files.get("a", file.id)).prefill == "done"

    async def test_a_file_that_cannot_be_read_is_not_read_ahead(self, world: World):
        row = await world.library.files.add(
            "a", "b.pdf", "user_data", io.BytesIO(b"%PDF-1.7\n no"), prefills=True
        )
        await world.work()
        await world.work(1)
        row = await world.library.files.get("a", row.id)
        assert row.prefill == "failed: the file could not be read"


async def test_responses_and_conversations_lose_what_they_have_of_it(library: Library):
    world = World(library)
    row = await world.add()
    place = {"file_id": row.id, "text": SECRET.decode()}
    named = {"type": "input_file", "file_id": row.id}
    said = {"type": "input_text", "text": f"Read {row.id}."}
    item = {"id": "msg_1", "type": "message", "role": "user", "content": [named, said]}
    kept: dict[str, Any] = {"id": "resp_1", "store": True, "previous_response_id": None}
    kept |= {"output": [{"id": "fs_1", "results": [place]}], "rapid": {"chunks": [place]}}
    attached = {"file_ids": [row.id]}
    await library.responses.keep("a", kept, [item], [], attached)
    conversation = await library.conversations.create("a", {}, [item])
    await library.delete("a", row.id)
    late = kept | {"id": "resp_2"}
    await library.responses.keep("a", late, [], [], attached)  # of an answer that was in progress
    await world.work()
    is_gone, removed, _ = await world.state(row.id)
    assert is_gone
    assert removed["responses"] == 2
    for name in ("resp_1", "resp_2"):
        found = await library.responses.get("a", name)
        assert found.response["output"] == [{"id": "fs_1", "results": []}]
        assert found.response["rapid"] == {"chunks": []}
        assert found.attached == {"file_ids": []}
    left = await library.conversations.get_item("a", conversation.id, "msg_1")
    assert left["content"] == [{"type": "input_text", "text": "Read deleted."}]
