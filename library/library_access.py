"""The library of one process: its database, blobs, files, stores and texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from library.blobs import Blobs
from library.database import Database
from library.jobs import Jobs
from library.library_config import LibraryConfig
from library.schema import FileRow
from library.stored_documents import StoredDocuments
from library.stored_files import StoredFiles
from library.vector_stores import VectorStores
from rapid.messages import Document, DocumentRef

_AT_ONCE = 100  # expired files of one transaction


@dataclass(frozen=True)
class Library:
    """The library, as one process has it open; other processes may too.

    Attributes:
        documents: The texts of files, for requests that name them.
    """

    config: LibraryConfig
    database: Database
    blobs: Blobs
    jobs: Jobs
    files: StoredFiles
    stores: VectorStores
    documents: StoredDocuments

    @classmethod
    async def open(cls, config: LibraryConfig) -> Library:
        """Open a library, and bring its tables up to date.

        Raises:
            LibraryUnavailable: Its database does not answer, or is of a later release.
        """
        database = Database.in_folder(config.folder)
        if config.database is not None:
            database = Database(config.database)
        blobs = Blobs.at(config.blobs) if config.blobs else Blobs.in_folder(config.folder / "files")
        await database.migrate()
        return cls.over(config, database, blobs)

    @classmethod
    def over(cls, config: LibraryConfig, database: Database, blobs: Blobs) -> Library:
        """Return the library in a database whose tables are up to date."""
        jobs = Jobs(database)
        files = StoredFiles(database, blobs, jobs, config)
        stores = VectorStores(database, jobs)
        documents = StoredDocuments(database, blobs, files, stores)
        return cls(config, database, blobs, jobs, files, stores, documents)

    async def delete_expired(self, now: float) -> None:
        """Delete the files and vector stores of all tenants whose time has passed.

        Args:
            now: Seconds since the epoch.
        """
        await self.stores.delete_expired()
        due = (
            select(FileRow)
            .where(FileRow.expires_at <= int(now), FileRow.status != "deleting")
            .limit(_AT_ONCE)
        )
        async with self.database.write() as session:
            for row in (await session.scalars(due)).all():
                row.status = "deleting"
                await self.jobs.add(session, "delete", row.tenant, row.id)

    async def close(self) -> None:
        """Disconnect."""
        await self.database.close()


class LibraryAccess:
    """A library that is opened when it is first needed, and tried again while it is away."""

    def __init__(self, config: LibraryConfig) -> None:
        self._config = config
        self._opening: asyncio.Task[Library] | None = None

    async def get(self) -> Library:
        """Return the library.

        Raises:
            LibraryUnavailable: Its database does not answer, or is of a later release.
        """
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(Library.open(self._config))
        return await asyncio.shield(self._opening)

    async def database(self) -> Database:
        """Return the library's database; errors are those of `get`."""
        return (await self.get()).database

    async def resolve(self, tenant: str, documents: Sequence[DocumentRef]) -> tuple[Document, ...]:
        """Return documents with their texts; see `rapid.ports.DocumentResolver`."""
        inline = tuple(each for each in documents if isinstance(each, Document))
        if len(inline) == len(documents):
            return inline
        return await (await self.get()).documents.resolve(tenant, documents)
