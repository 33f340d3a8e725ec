"""The library's database: an SQLite file or PostgreSQL, behind sessions that read or write.

SQLite is shared by the processes of one machine: readers go on beside the one writer, who waits in
line for the others (https://sqlite.org/wal.html). A transaction that will write takes the lock when
it begins: one that took it later could find that what it read has changed, and would fail.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, event, func, make_url, select, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from rapid.errors import LibraryFull, LibraryUnavailable

_WAIT_S = 20.0  # longest wait for another process's transaction, each of which takes milliseconds
_MIGRATING = 0x52415049  # the advisory lock of PostgreSQL under which tables are made


class Database:
    """Sessions of one database; it belongs to one event loop."""

    def __init__(self, url: str) -> None:
        """Connect to nothing yet.

        Args:
            url: ``sqlite:///path`` or ``postgresql://user@host/name``.
        """
        drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
        parsed = make_url(url)
        self._where = parsed.render_as_string(hide_password=True)
        self.is_shared = parsed.drivername == "postgresql"
        options: dict[str, Any] = {"pool_pre_ping": True} if self.is_shared else {}
        self._engine = create_async_engine(
            parsed.set(drivername=drivers[parsed.drivername]), **options
        )
        if not self.is_shared:
            event.listen(self._engine.sync_engine, "connect", _prepare)
            event.listen(self._engine.sync_engine, "begin", _begin)
        self._writing = self._engine.execution_options(writes=True)

    @classmethod
    def in_folder(cls, folder: Path) -> Database:
        """Return the SQLite database in a folder, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return cls(f"sqlite:///{folder.absolute() / 'library.sqlite'}")

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Yield a session whose look-ups see one state.

        Raises:
            LibraryUnavailable: The database does not answer.
        """
        with self._errors_named():
            async with AsyncSession(self._engine, expire_on_commit=False) as session:
                yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """Yield a session whose changes are kept together at its end, or not at all.

        Raises:
            LibraryUnavailable: The database does not answer.
            LibraryFull: There is no room on its disk.
        """
        with self._errors_named():
            session = AsyncSession(self._writing, expire_on_commit=False)
            async with session, session.begin():
                yield session

    async def take_turn(self, session: AsyncSession, name: str) -> None:
        """Wait until no other transaction has the turn of `name`, and have it to the end of this.

        On SQLite a transaction that writes is alone anyway.
        """
        if self.is_shared:
            turn = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), signed=True)
            await session.execute(select(func.pg_advisory_xact_lock(turn)))

    async def migrate(self) -> None:
        """Bring the tables to this version of the library; several processes may at once.

        Raises:
            LibraryUnavailable: The database does not answer, or is of a later version.
        """
        with self._errors_named():
            async with self._writing.begin() as connection:
                if self.is_shared:
                    await connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATING})"))
                await connection.run_sync(self._migrate)

    def _migrate(self, connection: Connection) -> None:
        config = Config()
        config.set_main_option("script_location", "library:migrations")
        config.attributes["connection"] = connection
        scripts = ScriptDirectory.from_config(config)
        held = MigrationContext.configure(connection).get_current_revision()
        known = {each.revision for each in scripts.walk_revisions()}
        if held is not None and held not in known:
            raise LibraryUnavailable(
                f"the library at {self._where} was written by a later release: upgrade this one"
            )
        if held != scripts.get_current_head():
            command.upgrade(config, "head")

    async def forget_deleted(self) -> None:
        """Leave no bytes of deleted rows in the database's files.

        SQLite overwrites what is deleted (``secure_delete``); its log is emptied here. PostgreSQL
        removes dead rows in ``VACUUM``; its log is the operator's, as are backups.
        """
        with self._errors_named():
            if self.is_shared:
                engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
                async with engine.connect() as connection:
                    await connection.execute(text("VACUUM"))
                return
            async with self._engine.connect() as connection:
                raw = await connection.get_raw_connection()
                assert raw.driver_connection is not None
                await raw.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    async def close(self) -> None:
        """Disconnect."""
        await self._engine.dispose()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, InterfaceError, DBAPIError, OSError) as error:
            if isinstance(error, DBAPIError) and not isinstance(
                error, OperationalError | InterfaceError
            ):
                raise  # a mistake in a statement, or a constraint
            if "is full" in str(error) or "No space left" in str(error):
                raise LibraryFull(
                    "The library's disk is full: delete files, then again."
                ) from error
            raise LibraryUnavailable("The library's database does not answer.") from error


def _prepare(connection: Any, _: object) -> None:
    connection.isolation_level = None  # `_begin` begins transactions, not the driver
    for pragma in (
        "journal_mode = WAL",
        "synchronous = FULL",
        f"busy_timeout = {int(1000 * _WAIT_S)}",
        "foreign_keys = ON",
        "secure_delete = ON",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    is_writing = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")
