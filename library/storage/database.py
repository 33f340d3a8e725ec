"""The library's database: an SQLite file or PostgreSQL, behind sessions that read or write.

SQLite is shared by the processes of one machine: readers go on beside the one writer, who waits in
line for the others (https://sqlite.org/wal.html). A transaction that will write takes the lock when
it begins: one that took it later could find that what it read has changed, and would fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Row, Select, event, func, make_url, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine

from rapid.errors import BadRequest, LibraryFull, LibraryUnavailable

_WAIT_S = 20.0  # longest wait for another process's transaction, each of which takes milliseconds
_AUTOCOMMIT = "AUTOCOMMIT"
_NO_TEXT = "A text has a character that is none: a NUL, or half of an escaped one."
_NOT_KEPT = ("invalid byte sequence", "surrogates not allowed")  # as PostgreSQL and its driver say
_PART_BYTES = 2**20  # of a file that is searched
_BYTES_OF_TABLES = (
    "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class "
    "WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
)
# They may still see rows that were deleted since, so that VACUUM leaves these.
_OLDER_TRANSACTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid() AND xact_start < :began "
    "AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)"
)
_OLDER_S = 2.0  # longest wait for them, each of which takes milliseconds; a backup takes hours
_LOOK_S = 0.05  # between two looks at them
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
        options: dict[str, Any] = {}
        if self.is_shared:  # which may also not answer at all
            patience = {"timeout": _WAIT_S, "command_timeout": _WAIT_S}
            options = {"pool_pre_ping": True, "connect_args": patience}
        self._engine = create_async_engine(
            parsed.set(drivername=drivers[parsed.drivername]),
            hide_parameters=True,  # which are tenants' words, and errors are logged
            **options,
        )
        if not self.is_shared:
            event.listen(self._engine.sync_engine, "connect", _prepare)
            event.listen(self._engine.sync_engine, "begin", _begin)
        self._writing = self._engine.execution_options(writes=True)
        self._glancing = self._engine.execution_options(isolation_level=_AUTOCOMMIT)
        self._kept: AsyncConnection | None = None
        self._turn = asyncio.Lock()  # of the connection that is kept

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

    async def glance(self, query: Select[Any], **values: str) -> Row[Any] | None:
        """Return the first row of one query with these values, for which a connection is kept.

        A session costs two milliseconds of the event loop, and this half of one.

        Raises:
            LibraryUnavailable: The database does not answer.
        """
        async with self._turn:
            try:
                return await self._glance(query, values)
            except LibraryUnavailable:  # perhaps it was away for a moment, and is not any more
                return await self._glance(query, values)

    async def _glance(self, query: Select[Any], values: dict[str, str]) -> Row[Any] | None:
        with self._errors_named():
            if self._kept is None:
                self._kept = await self._glancing.connect().start()
            try:
                found: Row[Any] | None = (await self._kept.execute(query, values)).first()
            except BaseException:  # it may still be busy with this, or be lost
                kept, self._kept = self._kept, None
                with suppress(Exception):
                    await asyncio.shield(kept.close())
                raise
            return found

    def insert(self, row: type[Any]) -> Any:
        """Return an INSERT with ``on_conflict_...``, which both kinds of database spell alike."""
        return (postgresql.insert if self.is_shared else sqlite.insert)(row)

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
        config.set_main_option("script_location", "library.storage:migrations")
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

    async def forget_deleted(self, word: str | None = None) -> tuple[int, bool]:
        """Leave no bytes of deleted rows in the database's files, and look for a word in them.

        SQLite overwrites what is deleted (``secure_delete``); its log is emptied here. PostgreSQL
        removes dead rows in ``VACUUM``, which goes through its tables and looks for no word; its
        log is the operator's, as are backups.

        Returns:
            The bytes that were looked through, in PostgreSQL those of the schema's tables, and
            whether no row was left for an older transaction, or the log is empty and has no such
            word.
        """
        with self._errors_named():
            if self.is_shared:
                engine = self._engine.execution_options(isolation_level=_AUTOCOMMIT)
                async with engine.connect() as connection:
                    is_alone = await _wait_for_older(connection)
                    await connection.execute(text("VACUUM"))
                    return (await connection.scalars(text(_BYTES_OF_TABLES))).one(), is_alone
            async with self._engine.connect() as connection:
                raw = await connection.get_raw_connection()
                driver: Any = raw.driver_connection
                # While it waits for readers, no other process can write.
                await driver.execute(f"PRAGMA busy_timeout = {int(1000 * _OLDER_S)}")
                try:
                    cursor = await driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    is_busy = bool((await cursor.fetchone())[0])
                    await cursor.close()
                finally:  # the connection goes back to others
                    await driver.execute(f"PRAGMA busy_timeout = {int(1000 * _WAIT_S)}")
        path = Path(str(self._engine.url.database))
        words = b"" if word is None else word.encode()
        found = await asyncio.to_thread(_search, [path, Path(f"{path}-wal")], words)
        return found[0], not (found[1] or is_busy)

    async def close(self) -> None:
        """Disconnect."""
        if self._kept is not None:
            await self._kept.close()
            self._kept = None
        await self._engine.dispose()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except UnicodeEncodeError as error:
            raise BadRequest(_NO_TEXT) from error
        except (OperationalError, InterfaceError, DBAPIError, OSError) as error:
            if any(each in str(error) for each in _NOT_KEPT):
                raise BadRequest(_NO_TEXT) from error
            if isinstance(error, DBAPIError) and not isinstance(
                error, OperationalError | InterfaceError
            ):
                raise  # a mistake in a statement, or a constraint
            if "is full" in str(error) or "No space left" in str(error):
                raise LibraryFull(
                    "The library's disk is full: delete files, then again."
                ) from error
            raise LibraryUnavailable("The library's database does not answer.") from error


async def _wait_for_older(connection: AsyncConnection) -> bool:
    """Wait a little for the transactions that run now; return whether all of them have ended."""
    began = (await connection.scalars(text("SELECT clock_timestamp()"))).one()
    query, until = text(_OLDER_TRANSACTIONS), time.monotonic() + _OLDER_S
    while is_seen := (await connection.scalars(query, {"began": began})).one() > 0:
        if time.monotonic() >= until:
            break
        await asyncio.sleep(_LOOK_S)
    return not is_seen


def _search(paths: Iterable[Path], word: bytes) -> tuple[int, bool]:
    """Return the bytes of files, and whether they have a word."""
    num_bytes, is_found = 0, False
    for path in paths:
        before = b""
        with suppress(FileNotFoundError), path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                num_bytes += len(part)
                is_found = is_found or bool(word and word in before + part)
                before = part[-len(word) :] if word else b""
    return num_bytes, is_found


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
    options = connection.get_execution_options()
    if options.get("isolation_level") == _AUTOCOMMIT:
        return  # or it would see for ever what it saw first
    is_writing = options.get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")
