"""Checks that rows, bytes and jobs of a library belong together, and repairs.

A crash may leave bytes of a file that nobody was told of. Anything else that is found here is a
mistake of this library, or of hands that changed its folder or brought a backup back. A text that
was deleted as a file and that a later request carried itself is found as well; the next such
request has it read again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from library.files.stored_files import layout_of, original_of, text_of
from library.jobs import JobKind
from library.library_access import Library
from library.storage.schema import FileRow, JobRow, StoreFileRow

Find: TypeAlias = Callable[[Mapping[str, str]], Awaitable[Collection[str]]]
"""Returns the names of those texts of which a place has parts, from names with their tenants."""

_OF_NO_FILE = ("delete", "forget")  # kinds of jobs that outlive their file
_YOUNG_S = 3600.0  # bytes that came since may belong to an upload that is not complete


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """Something that does not belong together.

    Attributes:
        kind: ``bytes without a file``, ``file without bytes``, ``work that nobody does``, or what
            is there of a deleted text, as ``KV of a deleted text``.
        name: Of the blob, file or text.
    """

    kind: str
    name: str


async def verify(
    library: Library,
    places: Sequence[tuple[str, Find]] = (),
    *,
    repairs: bool = False,
    clock: Callable[[], float] = time.time,
    young_s: float = _YOUNG_S,
) -> list[Discrepancy]:
    """Return what does not belong together, oldest bytes first.

    Args:
        library: What is looked at; it may be in use.
        places: Where parts of texts are kept beside it: what they are, and how they are found.
        repairs: Whether bytes without a file are deleted, files without bytes said to be lost, and
            work given to somebody: deleted texts are forgotten again by the processes that run.
        clock: Seconds since the epoch.
        young_s: Bytes that are younger are left alone.
    """
    blobs = await library.blobs.list_blobs()
    names = {each.name for each in blobs}
    old = [each.name for each in blobs if each.put_at <= clock() - young_s]
    async with library.database.write() as session:
        files = {row.id: row for row in (await session.scalars(select(FileRow))).all()}
        expected = {name for row in files.values() for name in _names_of(row)}
        unknown = [name for name in old if name not in expected]
        findings = [Discrepancy("bytes without a file", each) for each in unknown]
        for row in files.values():
            if missing := _blobs_of(row) - names:
                findings.append(Discrepancy("file without bytes", row.id))
                if repairs and row.status != "deleting":
                    row.status, row.error_code = "error", "lost"
                    row.error_message = f"Its bytes are gone ({min(missing)}): upload it again."
        findings += await _find_work(session, library, files, repairs=repairs)
    if repairs:
        await library.blobs.delete(unknown)
    return findings + await _find_deleted(library, places, repairs=repairs)


async def _find_deleted(
    library: Library, places: Sequence[tuple[str, Find]], *, repairs: bool
) -> list[Discrepancy]:
    """Return what is there of texts that were deleted; with `repairs` a job has them forgotten."""
    deleted = await library.deletions.list_texts(is_complete=True)
    found = {(kind, name) for kind, find in places for name in await find(deleted)}
    if repairs:
        async with library.database.write() as session:
            for name in {name for _, name in found}:
                await library.jobs.add(session, "forget", deleted[name], name)
    return [Discrepancy(f"{kind} of a deleted text", name) for kind, name in sorted(found)]


async def _find_work(
    session: AsyncSession, library: Library, files: dict[str, FileRow], *, repairs: bool
) -> list[Discrepancy]:
    """Return the files whose work nobody does; with `repairs` there is a job for it then."""
    jobs = (await session.scalars(select(JobRow))).all()
    known = {(job.file_id, job.kind, job.store_id) for job in jobs}
    entries = (await session.scalars(select(StoreFileRow))).all()
    needed: dict[tuple[str, JobKind, str], str] = {}
    for row in files.values():
        if row.status == "uploaded":
            needed[row.id, "read", ""] = row.tenant
        elif row.status == "deleting":
            needed[row.id, "delete", ""] = row.tenant
        if row.prefill == "queued" and row.status in ("uploaded", "processed"):
            needed[row.id, "prefill", ""] = row.tenant
    for each in entries:
        if each.status == "in_progress":  # after the file is read, so the later job
            needed[each.file_id, "index", each.store_id] = each.tenant
    undone = [key for key in needed if key not in known]
    if repairs:
        for file_id, kind, store_id in undone:
            tenant = needed[file_id, kind, store_id]
            await library.jobs.add(session, kind, tenant, file_id, store_id)
        gone = [job.id for job in jobs if job.file_id not in files and job.kind not in _OF_NO_FILE]
        await session.execute(delete(JobRow).where(JobRow.id.in_(gone)))
    return [Discrepancy("work that nobody does", file_id) for file_id, _, _ in undone]


def _names_of(row: FileRow) -> Iterator[str]:
    yield from (original_of(row.id), text_of(row.id), layout_of(row.id))


def _blobs_of(row: FileRow) -> set[str]:
    if row.status in ("deleting", "error"):
        return set()
    return set(_names_of(row)) if row.status == "processed" else {original_of(row.id)}
