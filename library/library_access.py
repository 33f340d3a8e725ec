"""The library of one process: its database, blobs, files, stores and texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import select

from library.files.deletions import Deletions
from library.files.stored_documents import StoredDocuments
from library.files.stored_files import StoredFiles
from library.files.vector_stores import VectorStores
from library.jobs import Jobs
from library.library_config import LibraryConfig
from library.responses.conversations import Conversations
from library.responses.kept_responses import KeptResponses
from library.responses.running_responses import RunningResponses
from library.storage.blobs import Blobs
from library.storage.database import Database
from library.storage.schema import FileRow
from rapid.chat_messages import Document, DocumentRef
from rapid.documents import add_keeper
from rapid.engine_status import Erasure

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
    deletions: Deletions
    responses: KeptResponses
    running: RunningResponses
    conversations: Conversations

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
        deletions = Deletions(database, blobs, jobs)
        conversations = Conversations(database, max_bytes=config.max_bytes)
        responses = KeptResponses(database, conversations)
        return cls(
            config=config,
            database=database,
            blobs=blobs,
            jobs=jobs,
            files=files,
            stores=stores,
            documents=documents,
            deletions=deletions,
            responses=responses,
            running=RunningResponses(database, conversations, responses),
            conversations=conversations,
        )

    async def delete(self, tenant: str, file_id: str) -> None:
        """Hide a file from everybody now; everything of it is deleted in the background.

        Raises:
            UnknownDocument: The tenant has none of this id.
        """
        await self.files.get(tenant, file_id)
        async with self.database.write() as session:
            row = await session.get(FileRow, file_id, with_for_update=True)
            if row is not None:
                await self.deletions.begin(session, row)

    async def delete_expired(self, now: float) -> None:
        """Delete the files, vector stores and responses of all tenants whose time has passed.

        Args:
            now: Seconds since the epoch.
        """
        await self.stores.delete_expired()
        await self.responses.delete_expired(now)
        due = (
            select(FileRow)
            .where(FileRow.expires_at <= int(now), FileRow.status != "deleting")
            .limit(_AT_ONCE)
            .with_for_update(skip_locked=True)
        )
        async with self.database.write() as session:
            for row in (await session.scalars(due)).all():
                await self.deletions.begin(session, row)

    async def close(self) -> None:
        """Disconnect."""
        await self.database.close()


class LibraryAccess:
    """A library that is opened when it is first needed, and tried again while it is away."""

    def __init__(self, config: LibraryConfig) -> None:
        self._config = config
        self._opening: asyncio.Task[Library] | None = None
        add_keeper(self)

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

    @asynccontextmanager
    async def hold(self, tenant: str, documents: Sequence[DocumentRef]) -> AsyncIterator[None]:
        """Keep the texts of stored documents while the context lasts; errors are those of `get`."""
        stored = [each for each in documents if not isinstance(each, Document)]
        if not stored:
            yield
            return
        with (await self.get()).documents.hold(tenant, stored):
            yield

    def drop_text(self, name: str) -> Erasure:
        """Drop a text that is kept in this process, unless a request has it; on any thread."""
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception():
            return Erasure("texts")
        return opening.result().documents.forget(name)

    async def resolve(self, tenant: str, documents: Sequence[DocumentRef]) -> tuple[Document, ...]:
        """Return documents with their texts; see `rapid.ports.DocumentResolver`."""
        inline = tuple(each for each in documents if isinstance(each, Document))
        if len(inline) == len(documents):
            return inline
        return await (await self.get()).documents.resolve(tenant, documents)
