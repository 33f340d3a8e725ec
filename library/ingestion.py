"""The work on files in the background: they are read, indexed, and deleted, by jobs.

::

    uploaded ──read──> processed ──prefill──> its KV is on a target, if that was asked for
                │           └────index, for each vector store──> completed
                └────> error (the file cannot be read)     └────> failed
    deleting ──delete──> bytes, text, vectors, KV and rows are gone (`library.files.deletions`)

Each step keeps its result and ends its job in one transaction: a worker that dies in between leaves
a job that another one does again, and what it had put under a name is put there once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from library.accounts.callers import TENANT
from library.files.deletions import Traces, is_pending
from library.files.stored_documents import sizes_of
from library.files.stored_files import layout_of, original_of, text_of
from library.jobs import LEASE_S, Jobs
from library.library_access import Library
from library.parsing import FileReaders, ParsedText, UnreadableFile
from library.storage.schema import FileRow, JobRow, StoreFileRow
from rapid.chat_messages import Document, DocumentRef
from rapid.documents import name_text
from rapid.engine_status import Erasure
from rapid.errors import (
    BadRequest,
    LibraryUnavailable,
    OrchestratorLost,
    Overloaded,
    RapidError,
    RetrievalPending,
    RetrievalUnavailable,
    TargetUnavailable,
)
from rapid.events import Reading, Tell

_log = logging.getLogger(__name__)

_LOOK_S = 0.5  # between two looks at the jobs while there are none
_SWEEP_S = 30.0  # between two looks for what has expired
_MOST_ATTEMPTS = 5  # with the waits between them, a minute
_MOST_WHILE_AWAY = 38  # with the waits between them, an hour
_AGAIN_S = 5.0  # after a failure that may pass, times the attempts so far
_UNREAD_S = 0.2  # between two looks of a job at a file that is not read yet
_MOST_FORGETTING_S = 30.0  # between two looks at parts of a deleted file that are in use
_ENDLESS = ("delete", "forget")  # kinds of jobs that are never given up
_MOST_REASON_CHARS = 512  # as the column has
# Errors that say nothing of a file, but of processes and servers that may come back.
_AWAY = (OrchestratorLost, Overloaded, RetrievalPending, RetrievalUnavailable, TargetUnavailable)


class DocumentIndex(Protocol):
    """A search index over texts."""

    async def index(self, tenant: str, document: Document, tell: Tell) -> None:
        """Add a document; one that is there already is left as it is."""
        ...

    async def forget(self, tenant: str, document: DocumentRef) -> Sequence[Erasure]:
        """Delete a document, and return where it was looked for."""
        ...

    async def forget_text(self, tenant: str, name: str) -> Sequence[Erasure]:
        """Delete all documents with the text of this name (`rapid.documents.name_text`)."""
        ...


class TargetReader(Protocol):
    """A service that computes the KV of documents on targets, so that questions find it there."""

    async def prefill(self, tenant: str, document: DocumentRef) -> None:
        """Have a document read where questions about it will be answered.

        Raises:
            BadRequest: It cannot be read.
            RapidError: It cannot be read now.
        """
        ...


class Ingestion:
    """A worker for the jobs of a library; there may be several of one library."""

    def __init__(
        self,
        library: Library,
        index: DocumentIndex | None,
        traces: Traces | None = None,
        reader: TargetReader | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start nothing yet.

        Args:
            library: Where the files are.
            index: Where texts are indexed; None where nothing is searched.
            traces: The processes that keep parts of texts; None where there is none but this.
            reader: What reads texts in advance; None where nothing does.
            clock: Seconds since the epoch.
        """
        self._library, self._index = library, index
        self._traces, self._reader = traces, reader
        self._jobs = Jobs(library.database, clock)
        self._clock = clock
        self._readers = FileReaders()
        self._owner = secrets.token_hex(8)

    async def run(self) -> None:
        """Do jobs as they come, and delete what expires, until this is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._library.config.workers):
                    group.create_task(self._work())
                group.create_task(self._sweep())
        finally:
            self._readers.close()

    async def drain(self) -> None:
        """Do jobs one after the other until none is due."""
        try:
            while await self._do_next():
                pass
        finally:
            self._readers.close()

    async def _work(self) -> None:
        while True:
            try:
                has_done = await self._do_next()
            except RapidError as error:
                _log.warning("the library is away: %s", error)
                has_done = False
            if not has_done:
                await asyncio.sleep(_LOOK_S)

    async def _do_next(self) -> bool:
        """Do the next job; return whether there was one."""
        TENANT.set(None)
        job = await self._jobs.claim(self._owner)
        if job is None:
            return False
        TENANT.set(job.tenant)
        renewing = asyncio.create_task(self._renew(job))
        doing = asyncio.create_task(self._do(job))
        try:
            await asyncio.wait({renewing, doing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (renewing, doing):
                task.cancel()
            await asyncio.wait({renewing, doing})
        if doing.cancelled():
            _log.warning("job %s of %s went to another worker", job.kind, job.file_id)
        elif (error := doing.exception()) is not None:
            await self._fail(job, error)
        return True

    async def _renew(self, job: JobRow) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            if not await self._jobs.renew(job):
                return

    async def _do(self, job: JobRow) -> None:
        steps = {
            "read": self._read,
            "index": self._add_to_index,
            "prefill": self._prefill,
            "delete": self._delete,
            "forget": self._forget_again,
        }
        await steps[job.kind](job)

    async def _fail(self, job: JobRow, error: BaseException) -> None:
        """Do a job again later; after several attempts say that it failed."""
        _log.warning("job %s of %s failed: %r", job.kind, job.file_id, error)
        most = _MOST_WHILE_AWAY if isinstance(error, _AWAY) else _MOST_ATTEMPTS
        is_endless = isinstance(error, LibraryUnavailable) or job.kind in _ENDLESS
        if is_endless or job.attempts < most:
            await self._jobs.postpone(job, _AGAIN_S * min(job.attempts, most))
            return
        again = "put the file into the store" if job.kind == "index" else "upload the file"
        what = (
            f"It failed {job.attempts} times for a reason on the server's side, which its log "
            f"says; when that is mended, {again} again."
        )
        async with self._library.database.write() as session:
            if await self._jobs.finish(session, job):
                await self._note_failure(session, job, "server_error", what)

    async def _note_failure(
        self, session: AsyncSession, job: JobRow, code: str, message: str
    ) -> None:
        row: FileRow | StoreFileRow | None
        if job.kind == "prefill":
            file = await session.get(FileRow, job.file_id, with_for_update=True)
            if file is not None:
                file.prefill = f"failed: {message}"[:_MOST_REASON_CHARS]
            return
        if job.kind == "read":
            row = await session.get(FileRow, job.file_id, with_for_update=True)
            status = "error"
        else:
            key = job.store_id, job.file_id
            row = await session.get(StoreFileRow, key, with_for_update=True)
            status = "failed"
        if row is not None:
            row.status, row.error_code, row.error_message = status, code, message

    async def _read(self, job: JobRow) -> None:
        """Read a file's text and pages out of its bytes."""
        async with self._library.database.read() as session:
            file = await session.get(FileRow, job.file_id)
        if file is None or file.status != "uploaded":
            async with self._library.database.write() as session:
                await self._jobs.finish(session, job)
            return
        try:
            parsed = await self._parse(job, file)
        except UnreadableFile as error:
            async with self._library.database.write() as session:
                if await self._jobs.finish(session, job):
                    await self._note_failure(session, job, error.code or "", str(error))
            return
        document = Document(file.filename, parsed.text)
        await self._library.blobs.put(layout_of(file.id), parsed.layout.to_bytes())
        await self._library.blobs.put(text_of(file.id), parsed.text.encode())
        async with self._library.database.write() as session:
            is_held = await self._jobs.finish(session, job)
            row = await session.get(FileRow, job.file_id, with_for_update=True)
            if not is_held or row is None:
                return
            if row.status == "uploaded":
                row.status = "processed"
            row.media_type, row.digest = parsed.media_type, document.digest
            row.num_chars, row.num_pages = document.num_chars, len(parsed.layout.pages)

    async def _parse(self, job: JobRow, file: FileRow) -> ParsedText:
        def tell(num_done: int, num_all: int) -> None:
            job.num_done, job.num_all = num_done, num_all

        config = self._library.config
        with tempfile.TemporaryFile() as copy:  # without a name: a crash leaves nothing of it
            await self._library.blobs.download(original_of(file.id), copy)
            parse = self._readers.parse_file
            return await parse(copy, file.filename, config.parsing_limits, tell)

    async def _add_to_index(self, job: JobRow) -> None:
        """Index the text of a file for a vector store."""
        async with self._library.database.read() as session:
            file = await session.get(FileRow, job.file_id)
            entry = await session.get(StoreFileRow, (job.store_id, job.file_id))
        is_wanted = entry is not None and entry.status == "in_progress"
        if file is not None and file.status == "uploaded" and is_wanted:
            await self._jobs.postpone(job, _UNREAD_S, is_failure=False)
            return
        text = ""
        if file is not None and file.status == "processed" and entry is not None and is_wanted:
            text = (await self._library.blobs.read(text_of(file.id))).decode()
            if self._index is not None:

                def tell(reading: Reading) -> None:
                    job.num_done, job.num_all = reading.num_read, reading.num_all

                sizes = sizes_of(entry.chunking)  # as searches in the store name it
                document = Document(file.filename, text, chunk_sizes=sizes)
                await self._index.index(job.tenant, document, tell)
        async with self._library.database.write() as session:
            if not await self._jobs.finish(session, job) or not is_wanted or file is None:
                return
            if file.status == "error":
                code, message = file.error_code or "server_error", file.error_message or ""
                await self._note_failure(session, job, code, message)
                return
            key = job.store_id, job.file_id
            row = await session.get(StoreFileRow, key, with_for_update=True)
            if row is not None and row.status == "in_progress":
                row.status, row.usage_bytes = "completed", len(text.encode())

    async def _prefill(self, job: JobRow) -> None:
        """Have targets read a file before anybody asks about it, and retrievers index it."""
        async with self._library.database.read() as session:
            file = await session.get(FileRow, job.file_id)
        if file is not None and file.status == "uploaded":
            await self._jobs.postpone(job, _UNREAD_S, is_failure=False)
            return
        outcome = "failed: the file could not be read"
        if file is not None and file.status == "processed" and file.digest is not None:
            try:
                outcome = await self._read_ahead(file.tenant, file)
            except Overloaded:  # those who wait for answers come first
                await self._jobs.postpone(job, _AGAIN_S, is_failure=False)
                return
        async with self._library.database.write() as session:
            is_held = await self._jobs.finish(session, job)  # first, as whoever fails does
            row = await session.get(FileRow, job.file_id, with_for_update=True)
            if is_held and row is not None:
                row.prefill = outcome[:_MOST_REASON_CHARS]

    async def _read_ahead(self, tenant: str, file: FileRow) -> str:
        if self._reader is None:
            return "failed: no target of this server reads files"
        text = (await self._library.blobs.read(text_of(file.id))).decode()
        document = Document(file.filename, text)
        if self._index is not None:
            await self._index.index(tenant, document, lambda _: None)
        try:
            await self._reader.prefill(tenant, document.ref)
        except BadRequest as error:
            return f"failed: {error}"
        return "done"

    async def _delete(self, job: JobRow) -> None:
        """Delete everything of a file: bytes, text, vectors, KV, its row, and the row's traces."""
        deletions, file_id = self._library.deletions, job.file_id
        async with self._library.database.read() as session:
            file = await session.get(FileRow, file_id)
        if file is not None:
            erasures = [await deletions.delete_bytes(file_id)]
            if await deletions.is_worked_on(file_id):
                erasures.append(Erasure("work", pending="in progress"))
            erasures += await self._forget(file)
            await deletions.note(file_id, erasures)
            if is_pending(erasures):
                await self._jobs.postpone(job, min(job.attempts, _MOST_FORGETTING_S))
                return
            if not await deletions.delete_rows(job):
                return
        if not await deletions.complete(job, file_id):
            await self._jobs.postpone(job, min(job.attempts, _MOST_FORGETTING_S))

    async def _forget(self, file: FileRow) -> list[Erasure]:
        """Have every part of a file's text forgotten that no other file of its tenant has."""
        if file.digest is None:
            return []
        has_text, has_name = await self._library.deletions.find_same(file)
        if not has_text:
            return await self._forget_text(file.tenant, name_text(file.tenant, file.digest))
        if self._index is None or has_name:
            return []
        ref = DocumentRef(file.filename, file.digest, file.num_chars or 0)
        return await _await_index(self._index.forget(file.tenant, ref))

    async def _forget_text(self, tenant: str, name: str) -> list[Erasure]:
        erasures: list[Erasure] = []
        if self._index is not None:
            erasures += await _await_index(self._index.forget_text(tenant, name))
        own = self._library.documents.forget(name)
        erasures.append(replace(own, place="librarian: texts"))
        if self._traces is not None:
            erasures += await self._traces.forget(name)
        return erasures

    async def _forget_again(self, job: JobRow) -> None:
        """Have a text forgotten once more, of which something was found (`library.upkeep`)."""
        name, erasures = job.file_id, list[Erasure]()
        if name in await self._library.deletions.list_texts():
            erasures = await self._forget_text(job.tenant, name)
        if is_pending(erasures):
            await self._jobs.postpone(job, min(job.attempts, _MOST_FORGETTING_S))
            return
        async with self._library.database.write() as session:
            await self._jobs.finish(session, job)

    async def _sweep(self) -> None:
        while True:
            with contextlib.suppress(RapidError):
                await self._library.delete_expired(self._clock())
                await self._library.deletions.drop_old()
                if self._traces is not None:
                    await self._traces.remind(self._library.deletions.list_texts)
            await asyncio.sleep(_SWEEP_S)


async def _await_index(call: Awaitable[Sequence[Erasure]]) -> list[Erasure]:
    """Return what an index says that it has forgotten, or that it may not have."""
    try:
        return [*await call]
    except RapidError as error:
        _log.warning("passages are not deleted yet: %s", error)
        return [Erasure("passages", pending="the retriever is away")]
