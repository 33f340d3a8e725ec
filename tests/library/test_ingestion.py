"""Files are read, indexed and deleted by workers that may die."""

from __future__ import annotations

import io
import logging
import time
from pathlib import Path

import pytest
from sqlalchemy import func, select

from library.accounts.callers import TENANT
from library.ingestion import Ingestion
from library.jobs import LEASE_S, Jobs
from library.library_access import Library
from library.storage.schema import FileRow, JobRow
from rapid.chat_messages import ChunkSizes
from rapid.errors import (
    DocumentNotReady,
    EngineFailed,
    Overloaded,
    RetrievalUnavailable,
    UnknownDocument,
)
from tests.library.libraries import FakeIndex
from tests.library.object_store import ObjectStore


async def add(library: Library, text: bytes = b"The key is 7.", tenant: str = "a") -> FileRow:
    return await library.files.add(tenant, "notes.txt", "user_data", io.BytesIO(text))


async def test_a_file_becomes_a_document(library: Library):
    file = await add(library)
    with pytest.raises(DocumentNotReady, match="still being read"):
        await library.documents.find("a", [file.id])
    await Ingestion(library, FakeIndex()).drain()
    (found,) = await library.documents.find("a", [file.id])
    (document,) = await library.documents.resolve("a", [found.ref])
    assert (document.name, document.text) == ("notes.txt", "The key is 7.")


async def test_another_tenant_has_no_such_file(library: Library):
    file = await add(library)
    await Ingestion(library, None).drain()
    (found,) = await library.documents.find("a", [file.id])
    with pytest.raises(UnknownDocument):
        await library.documents.find("b", [file.id])
    with pytest.raises(UnknownDocument):
        await library.documents.resolve("b", [found.ref])
    with pytest.raises(UnknownDocument):
        await library.stores.create("b", file_ids=[file.id])


async def test_a_file_that_cannot_be_read_says_why(library: Library):
    file = await add(library, b"%PDF-1.7\n and then nothing")
    store = await library.stores.create("a", file_ids=[file.id])
    await Ingestion(library, FakeIndex()).drain()
    row = await library.files.get("a", file.id)
    assert row.status == "error"
    assert row.error_code == "broken_file"
    assert row.error_message
    entry = await library.stores.get_file("a", store.id, file.id)
    assert (entry.status, entry.error_code) == ("failed", row.error_code)
    with pytest.raises(DocumentNotReady, match="could not be read"):
        await library.documents.find("a", [file.id])


async def test_a_store_is_indexed_and_forgets_what_is_deleted(
    library: Library, tmp_path: Path, s3_server: ObjectStore
):
    kept_in = s3_server.folder if library.database.is_shared else tmp_path
    index = FakeIndex()
    worker = Ingestion(library, index)
    file = await add(library, b"a secret of the tenant")
    store = await library.stores.create("a", file_ids=[file.id])
    with pytest.raises(DocumentNotReady, match="indexed"):
        await library.documents.find("a", store_ids=[store.id])
    await worker.drain()
    (found,) = await library.documents.find("a", store_ids=[store.id])
    assert [each.name for each in index.documents.values()] == ["notes.txt"]
    assert holds(kept_in, b"a secret of the tenant")
    await library.delete("a", file.id)
    with pytest.raises(UnknownDocument):
        await library.files.get("a", file.id)
    assert await library.documents.find("a", store_ids=[store.id]) == ()
    await worker.drain()
    assert not index.documents
    assert not holds(kept_in, b"a secret of the tenant")
    assert not holds(kept_in, b"notes.txt")
    with pytest.raises(UnknownDocument):
        await library.documents.resolve("a", [found.ref])


async def test_a_file_is_indexed_in_the_cut_of_its_store(library: Library):
    file, index = await add(library), FakeIndex()
    static = {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 400}
    chunking = {"type": "static", "static": static}
    store = await library.stores.create("a", file_ids=[file.id], chunking=chunking)
    await Ingestion(library, index).drain()
    (indexed,) = index.documents.values()
    found = await library.documents.get_in_store("a", store.id, file.id)
    assert found.ref == indexed.ref
    assert found.ref.chunk_sizes == ChunkSizes(800, 400)
    (listed,) = await library.documents.find_in_store("a", store.id)
    assert listed.ref == found.ref
    (read,) = await library.documents.resolve("a", [found.ref])
    assert read.ref == found.ref


async def test_a_text_stays_while_another_file_has_it(library: Library):
    index = FakeIndex()
    worker = Ingestion(library, index)
    first, second = await add(library), await add(library)
    await library.stores.create("a", file_ids=[first.id, second.id])
    await worker.drain()
    await library.delete("a", first.id)
    await worker.drain()
    assert len(index.documents) == 1


async def test_what_a_dead_worker_held_is_done_again(library: Library):
    file = await add(library)
    now = time.time() + 60
    jobs = Jobs(library.database, lambda: now)
    assert await jobs.claim("dead") is not None
    assert await jobs.claim("other") is None
    now += LEASE_S + 1
    worker = Ingestion(library, FakeIndex(), clock=lambda: now)
    await worker.drain()
    assert (await library.files.get("a", file.id)).status == "processed"


async def test_a_worker_that_lost_its_lease_keeps_nothing(library: Library):
    file = await add(library)
    later = time.time()
    jobs = Jobs(library.database, lambda: later)
    job = await jobs.claim("slow")
    assert job is not None
    later += LEASE_S + 1
    assert await jobs.claim("quick") is not None
    assert not await jobs.renew(job)
    async with library.database.write() as session:
        assert not await jobs.finish(session, job)
    assert (await library.files.get("a", file.id)).status == "uploaded"


async def test_tenants_take_turns(library: Library):
    for _ in range(3):
        await add(library, tenant="a")
    await add(library, tenant="b")
    jobs = Jobs(library.database, lambda: time.time() + 1)
    claimed = [await jobs.claim("w") for _ in range(4)]
    assert [each.tenant for each in claimed if each] == ["a", "b", "a", "a"]


async def test_an_index_that_is_away_is_tried_again(library: Library):
    now = time.time() + 60
    index = FakeIndex()
    index.failure = RetrievalUnavailable("away")
    worker = Ingestion(library, index, clock=lambda: now)
    file = await add(library)
    store = await library.stores.create("a", file_ids=[file.id])
    await worker.drain()
    entry = await library.stores.get_file("a", store.id, file.id)
    assert entry.status == "in_progress"
    index.failure = None
    now += 60
    await worker.drain()
    entry = await library.stores.get_file("a", store.id, file.id)
    assert (entry.status, entry.usage_bytes) == ("completed", 13)


@pytest.mark.parametrize(
    ("failure", "waited_s"),
    [
        (RetrievalUnavailable("away"), pytest.approx(3600, rel=0.05)),
        (Overloaded("full"), pytest.approx(3600, rel=0.05)),
        (EngineFailed("The embedder failed."), 50),
    ],
)
async def test_a_failure_is_given_up_and_later_if_it_is_of_a_server_that_is_away(
    library: Library, failure: Exception, waited_s: float
):
    began = now = time.time() + 60
    index = FakeIndex()
    index.failure = failure
    worker = Ingestion(library, index, clock=lambda: now)
    file = await add(library)
    store = (await library.stores.create("a", file_ids=[file.id])).id
    await worker.drain()
    waits = []
    while (due := await find_due(library)) is not None:
        waits.append(due - now)
        now = due
        await worker.drain()
    assert now - began == waited_s
    assert waits == sorted(waits)
    row = await library.stores.get_file("a", store, file.id)
    assert (row.status, row.error_code) == ("failed", "server_error")
    assert row.error_message
    assert row.error_message.endswith("put the file into the store again.")
    index.failure = None
    await library.stores.put("a", store, [file.id])  # as it says
    await worker.drain()
    assert (await library.stores.get_file("a", store, file.id)).status == "completed"


async def test_a_file_that_is_read_for_long_leaves_its_indexing_all_attempts(library: Library):
    now = time.time() + 60
    index = FakeIndex()
    index.failure = EngineFailed("The embedder failed.")
    worker = Ingestion(library, index, clock=lambda: now)
    file = await add(library)
    store = await library.stores.create("a", file_ids=[file.id])
    reading = await Jobs(library.database, lambda: now).claim("another worker, which will die")
    assert reading
    assert reading.kind == "read"
    for _ in range(8):
        await worker.drain()
        now += 1
    now += LEASE_S
    await worker.drain()
    index.failure = None
    now += 5
    await worker.drain()
    assert (await library.stores.get_file("a", store.id, file.id)).status == "completed"


async def test_a_file_that_the_server_fails_to_read_is_to_be_uploaded_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
):
    async def fail(*_: object) -> None:
        raise EngineFailed("a bug")

    monkeypatch.setattr(library.blobs, "download", fail)
    now = time.time() + 60
    worker = Ingestion(library, FakeIndex(), clock=lambda: now)
    file = await add(library)
    for _ in range(5):
        await worker.drain()
        now += 25
    row = await library.files.get("a", file.id)
    assert (row.status, row.error_code) == ("error", "server_error")
    assert row.error_message
    assert row.error_message.endswith("upload the file again.")


class TenantsOfLines(logging.Handler):
    """Notes the tenants whom the lines of the library would name."""

    def __init__(self) -> None:
        super().__init__()
        self.tenants: list[str | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.tenants.append(TENANT.get())


async def test_all_lines_of_a_job_name_its_tenant(
    library: Library, monkeypatch: pytest.MonkeyPatch
):
    lines, index = TenantsOfLines(), FakeIndex()
    monkeypatch.setattr(logging.getLogger("library"), "handlers", [lines])
    now = time.time() + 60
    worker = Ingestion(library, index, clock=lambda: now)
    for tenant in "ab":
        file = await add(library, tenant=tenant)
        await library.stores.create(tenant, file_ids=[file.id])
        await worker.drain()
        index.failure = RetrievalUnavailable("away")
        await library.delete(tenant, file.id)  # whose passages are not deleted
        await worker.drain()
    assert lines.tenants == ["a", "b", "b"]
    assert TENANT.get() is None


async def find_due(library: Library) -> float | None:
    """When the next job is due, in seconds since the epoch."""
    async with library.database.read() as session:
        due: float | None = await session.scalar(select(func.min(JobRow.due_at)))
    return due


async def test_files_and_stores_expire(library: Library):
    worker = Ingestion(library, FakeIndex())
    file = await library.files.add("a", "n.txt", "user_data", io.BytesIO(b"x"), expires_in_s=3600)
    await worker.drain()
    await library.delete_expired(file.created / 1e9 + 3500)
    assert (await library.files.get("a", file.id)).status == "processed"
    await library.delete_expired(file.created / 1e9 + 3700)
    with pytest.raises(UnknownDocument):
        await library.files.get("a", file.id)


async def test_two_files_of_one_name_are_two_documents(library: Library):
    files = [await add(library, each) for each in (b"one", b"two")]
    await Ingestion(library, None).drain()
    ids = [each.id for each in files]
    refs = [each.ref for each in await library.documents.find("a", ids, taken=["notes.txt"])]
    assert [each.name for each in refs] == ["notes.txt (2)", "notes.txt (3)"]
    texts = await library.documents.resolve("a", refs)
    assert [each.text for each in texts] == ["one", "two"]


def holds(folder: Path, words: bytes) -> bool:
    """Whether the words stand in a file of the folder."""
    return any(words in each.read_bytes() for each in folder.rglob("*") if each.is_file())
