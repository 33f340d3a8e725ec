"""The deletion of files, and the certificates that say where their parts were looked for.

::

    deleting ──bytes, vectors, KV, texts──> no row ──log emptied──> certificate complete

A part that is in use is looked for again until it is gone; until then the certificate says
``pending``. It outlives the file under a hash of its id, so that the database can be searched for
the id itself. With it stays the name of the text, for engines that start later and find its KV on
their disks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Protocol

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from library.files.stored_files import layout_of, original_of, text_of
from library.jobs import Jobs
from library.responses.traces_of_files import erase_traces
from library.storage.blobs import Blobs
from library.storage.database import Database
from library.storage.schema import DeletionRow, FileRow, JobRow
from rapid.documents import name_text
from rapid.engine_status import Erasure

_KEPT_S = 366 * 86_400.0  # of a certificate: a year
_LOOK_S = 0.1  # between two looks at a certificate that is awaited


class Traces(Protocol):
    """The processes that keep parts of texts in memory, or of their KV in any tier."""

    async def forget(self, name: str) -> Sequence[Erasure]:
        """Drop all parts of the text of a name, and return where they were looked for."""
        ...

    async def remind(self, find: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Have engines that started since the last call drop the texts whose names `find` finds."""
        ...


class Deletions:
    """The certificates in a database, and the work that makes them true."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        jobs: Jobs,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._blobs, self._jobs = database, blobs, jobs
        self._clock = clock

    async def begin(self, session: AsyncSession, row: FileRow) -> None:
        """Hide a file within a transaction, and have everything of it deleted."""
        if row.status == "deleting":
            return
        row.status = "deleting"
        await self._jobs.add(session, "delete", row.tenant, row.id)
        session.add(
            DeletionRow(
                id=name_deletion(row.id),
                tenant=row.tenant,
                began_at=self._clock(),
                ended_at=None,
                text_name=row.digest and name_text(row.tenant, row.digest),
                erasures=[],
            )
        )

    async def find(self, tenant: str, file_id: str) -> DeletionRow | None:
        """Return the certificate of a deletion; None if the tenant has asked for none."""
        async with self._database.read() as session:
            row = await session.get(DeletionRow, name_deletion(file_id))
        return row if row is not None and row.tenant == tenant else None

    async def wait(self, tenant: str, file_id: str, seconds: float) -> DeletionRow | None:
        """Return the certificate of a deletion as soon as it is complete, or after some seconds."""
        until = self._clock() + seconds
        while True:
            row = await self.find(tenant, file_id)
            if row is None or row.ended_at is not None or self._clock() >= until:
                return row
            await asyncio.sleep(_LOOK_S)

    async def list_texts(self, *, is_complete: bool = False) -> dict[str, str]:
        """Return the names of all texts that were deleted and that nobody has uploaded again.

        Each has its tenant. With `is_complete` they are those of which nothing should be left.
        """
        named = [DeletionRow.text_name.is_not(None)]
        if is_complete:
            named.append(DeletionRow.ended_at.is_not(None))
        async with self._database.read() as session:
            deleted = (await session.execute(select(DeletionRow).where(*named))).scalars().all()
            tenants = {each.tenant for each in deleted}
            there = select(FileRow.tenant, FileRow.digest).where(FileRow.tenant.in_(tenants))
            if not is_complete:
                there = there.where(FileRow.status != "deleting")
            found = (await session.execute(there)).all()
        kept = {name_text(tenant, digest) for tenant, digest in found if digest is not None}
        texts = {each.text_name: each.tenant for each in deleted if each.text_name}
        return {name: tenant for name, tenant in texts.items() if name not in kept}

    async def drop_old(self) -> None:
        """Delete the certificates of more than a year ago."""
        async with self._database.write() as session:
            old = DeletionRow.ended_at < self._clock() - _KEPT_S
            await session.execute(delete(DeletionRow).where(old))

    async def find_same(self, file: FileRow) -> tuple[bool, bool]:
        """Return whether another file has the same text, and one of the same name has it."""
        same = select(FileRow.filename).where(
            FileRow.tenant == file.tenant,
            FileRow.digest == file.digest,
            FileRow.id != file.id,
            FileRow.status != "deleting",
        )
        async with self._database.read() as session:
            names = (await session.scalars(same)).all()
        return bool(names), file.filename in names

    async def delete_bytes(self, file_id: str) -> Erasure:
        """Delete the bytes, the text and the layout of a file."""
        names = [original_of(file_id), text_of(file_id), layout_of(file_id)]
        sizes = await self._blobs.sizes(names)
        await self._blobs.delete(names)
        return Erasure("files", sum(sizes.values()), len(sizes))

    async def is_worked_on(self, file_id: str) -> bool:
        """Return whether other work on a file is in progress; what has not begun is given up."""
        others = JobRow.file_id == file_id, JobRow.kind != "delete"
        async with self._database.write() as session:
            await session.execute(
                delete(JobRow).where(*others, JobRow.leased_until <= self._clock())
            )
            return (await session.scalars(select(JobRow.id).where(*others))).first() is not None

    async def note(self, file_id: str, erasures: Iterable[Erasure]) -> None:
        """Write into a certificate what was done in some places now, beside what was before."""
        async with self._database.write() as session:
            row = await session.get(DeletionRow, name_deletion(file_id))
            if row is not None:
                row.erasures = _merge(row.erasures, erasures)

    async def delete_rows(self, job: JobRow) -> bool:
        """Delete a file's rows and its traces, after which its job has another id, of no file.

        Returns:
            Whether the job's lease still held; if not, nothing was done.
        """
        async with self._database.write() as session:
            held = await session.get(JobRow, job.id, with_for_update=True)
            if held is None or held.owner != job.owner:
                return False
            row = await session.get(FileRow, job.file_id)
            if row is not None:
                await session.delete(row)
            num_found = await erase_traces(session, job.tenant, job.file_id)
            certificate = await session.get(DeletionRow, name_deletion(job.file_id))
            if certificate is not None and num_found:
                erased = Erasure("responses", 0, num_found)
                certificate.erasures = _merge(certificate.erasures, [erased])
            held.file_id = name_deletion(job.file_id)
            return True

    async def complete(self, job: JobRow, file_id: str) -> bool:
        """Empty the database's log, look for the id of a file, and end the job.

        Returns:
            Whether the certificate is complete; if not, others still read the log, or old rows.
        """
        # Of a deletion that another worker began, the id is not known any more.
        is_known = file_id != name_deletion(file_id)
        num_bytes, is_gone = await self._database.forget_deleted(file_id if is_known else None)
        place, pending = "database and its log", "the log is in use"
        if self._database.is_shared:
            place = "database (its log and its backups are the operator's)"
            pending = "another transaction may see old rows"
        async with self._database.write() as session:
            row = await session.get(DeletionRow, name_deletion(file_id))
            if row is not None:
                erasure = Erasure(place, num_bytes, 0, None if is_gone else pending)
                row.erasures = _merge(row.erasures, [erasure])
                row.ended_at = self._clock() if is_gone else None
            if is_gone:
                await self._jobs.finish(session, job)
        return is_gone


def name_deletion(file_id: str) -> str:
    """Return the id of a file's certificate, which is also that of a file that has no row more."""
    prefix = "deleted-"
    if file_id.startswith(prefix):
        return file_id
    return prefix + blake2b(file_id.encode(), digest_size=16).hexdigest()


def is_pending(erasures: Iterable[Erasure]) -> bool:
    """Return whether parts may still be in one of some places."""
    return any(each.pending for each in erasures)


def _merge(
    known: Sequence[dict[str, object]], erasures: Iterable[Erasure]
) -> list[dict[str, object]]:
    """Return what was done in each place; what was removed there adds up, what is pending not."""
    before_now = [Erasure(**each) for each in known]  # type: ignore[arg-type]
    places = {each.place: replace(each, pending=None) for each in before_now}
    for each in erasures:
        before = places.get(each.place, each)
        num_found = each.num_found + (before.num_found if before is not each else 0)
        places[each.place] = replace(each, num_found=num_found)
    return [asdict(each) for each in places.values()]
