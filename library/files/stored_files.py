"""The files of tenants: uploaded, listed, downloaded and deleted.

A file's bytes are kept before its row, and deleted after its row says so: what a caller was told of
is always there, and what a crash leaves between the two has no row (`library.upkeep` finds it).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import IO

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from library.jobs import Jobs
from library.library_config import LibraryConfig
from library.room import check_room
from library.storage.blobs import Blobs
from library.storage.database import Database
from library.storage.listing import Cut, Page, list_page
from library.storage.schema import FileRow, LimitsRow
from rapid.errors import BadRequest, BodyTooLarge, LibraryUnavailable, UnknownDocument

_MOST_NAME_BYTES = 255  # what file systems take
_READ_BYTES = 2**20  # of a file at once, while it is hashed


class StoredFiles:
    """The files in a database and a store of blobs."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        jobs: Jobs,
        config: LibraryConfig,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._database, self._blobs, self._jobs = database, blobs, jobs
        self._config = config
        self._clock_ns = clock_ns

    async def add(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        content: IO[bytes],
        expires_in_s: int | None = None,
        *,
        prefills: bool = False,
    ) -> FileRow:
        """Keep a file, which is read in the background from now on.

        Args:
            tenant: Its owner.
            filename: Its name, without folders.
            purpose: What the owner says it is for.
            content: Its bytes.
            expires_in_s: After so many seconds it is deleted; None for never.
            prefills: Whether a target reads it in advance.

        Raises:
            BadRequest: The name cannot be one, the file is empty, or the tenant has too many.
            BodyTooLarge: The file is too long.
            LibraryUnavailable: The library cannot keep it; nothing was changed.
        """
        check_filename(filename)
        num_bytes, sha256 = await asyncio.to_thread(_measure, content)
        if not num_bytes:
            raise BadRequest(f"{filename!r} is empty: there is nothing to read.", "file")
        if num_bytes > self._config.max_file_bytes:
            raise BodyTooLarge(
                f"{filename!r} has {num_bytes} bytes, and a file may have "
                f"{self._config.max_file_bytes}: split it.",
                "file",
            )
        now = self._clock_ns()
        row = FileRow(
            id=f"file-{secrets.token_hex(12)}",
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            num_bytes=num_bytes,
            sha256=sha256,
            created=now,
            expires_at=None if expires_in_s is None else now // 10**9 + expires_in_s,
            status="uploaded",
            prefill="queued" if prefills else None,
        )
        await self._blobs.put(original_of(row.id), content)
        try:
            async with self._database.write() as session:
                await self._database.take_turn(session, tenant)
                await self._check_room(session, tenant, num_bytes)
                session.add(row)
                await self._jobs.add(session, "read", tenant, row.id)
                if prefills:
                    await self._jobs.add(session, "prefill", tenant, row.id)
        except BaseException:
            with contextlib.suppress(LibraryUnavailable):  # then `library.upkeep` deletes them
                await asyncio.shield(self._blobs.delete([original_of(row.id)]))
            raise
        return row

    async def _check_room(self, session: AsyncSession, tenant: str, num_more: int) -> None:
        total = select(func.count()).select_from(FileRow).where(FileRow.tenant == tenant)
        num_files = (await session.execute(total)).scalar_one()
        own = await session.get(LimitsRow, tenant)
        most_files = (own and own.files) or self._config.max_files
        if num_files >= most_files:
            raise BadRequest(
                f"You have {num_files} files, which is the most: delete some.", "file", "quota"
            )
        await check_room(session, tenant, num_more, self._config.max_bytes, "file")

    async def get(self, tenant: str, file_id: str) -> FileRow:
        """Return a file.

        Raises:
            UnknownDocument: The tenant has none of this id.
        """
        async with self._database.read() as session:
            row = await session.get(FileRow, file_id)
        if row is None or row.tenant != tenant or row.status == "deleting":
            raise UnknownDocument(f"There is no file {file_id!r}.", "file_id", "file_not_found")
        return row

    async def list_files(self, tenant: str, cut: Cut, purpose: str | None = None) -> Page[FileRow]:
        """Return a page of the tenant's files, perhaps of those of one purpose."""
        found = select(FileRow).where(FileRow.tenant == tenant, FileRow.status != "deleting")
        if purpose is not None:
            found = found.where(FileRow.purpose == purpose)
        async with self._database.read() as session:
            return await list_page(session, found, FileRow, FileRow.id, cut)

    async def stream(self, row: FileRow) -> AsyncIterator[bytes]:
        """Yield the bytes of a file, in parts.

        Raises:
            UnknownDocument: They are gone: it was deleted meanwhile, or lost.
        """
        try:
            async for part in self._blobs.stream(original_of(row.id)):
                yield part
        except FileNotFoundError:
            raise UnknownDocument(
                f"The bytes of {row.id!r} are gone: upload it again.", "file_id", "lost"
            ) from None


def original_of(file_id: str) -> str:
    """Return the name of the blob with a file's bytes."""
    return f"originals/{file_id}"


def text_of(file_id: str) -> str:
    """Return the name of the blob with a file's text, in UTF-8."""
    return f"texts/{file_id}"


def layout_of(file_id: str) -> str:
    """Return the name of the blob with a text's pages and lines."""
    return f"layouts/{file_id}"


def check_filename(filename: str) -> None:
    """Check that a name is one of a file.

    Raises:
        BadRequest: It is empty, too long, or has folders or control characters.
    """
    has_folders = "/" in filename or "\\" in filename
    if has_folders or not filename.isprintable() or not filename.strip(". "):
        raise BadRequest(
            "The file's name must be one without folders and control characters.", "file"
        )
    if len(filename.encode()) > _MOST_NAME_BYTES:
        raise BadRequest(f"The file's name has more than {_MOST_NAME_BYTES} bytes.", "file")


def _measure(content: IO[bytes]) -> tuple[int, str]:
    digest, num_bytes = hashlib.sha256(), 0
    content.seek(0)
    while part := content.read(_READ_BYTES):
        digest.update(part)
        num_bytes += len(part)
    return num_bytes, digest.hexdigest()
