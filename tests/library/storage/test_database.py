import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError

from library.storage.database import Database
from library.storage.schema import Base, VectorStoreRow
from rapid.errors import LibraryUnavailable


def a_store(number: int) -> VectorStoreRow:
    return VectorStoreRow(
        id=f"vs_{number}", tenant="a", name="", facts={}, created=number, last_active_at=0
    )


async def test_the_migrations_make_the_tables_of_the_schema(database: Database):
    async with database.write() as session:
        connection = await session.connection()
        differences = await connection.run_sync(
            lambda it: compare_metadata(MigrationContext.configure(it), Base.metadata)
        )
    assert differences == []


async def test_processes_may_migrate_at_once(database: Database):
    await asyncio.gather(*(database.migrate() for _ in range(4)))


async def test_a_database_of_a_later_release_is_refused(database: Database):
    async with database.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(LibraryUnavailable, match="upgrade this one"):
        await database.migrate()


async def test_an_error_has_no_words_of_tenants(database: Database):
    with pytest.raises(IntegrityError) as failed:
        async with database.write() as session:
            await session.execute(insert(VectorStoreRow), [{"id": "vs_1", "name": "secret"}])
    assert "secret" not in str(failed.value)


async def test_writers_wait_for_one_another(database: Database):
    async def add(number: int) -> None:
        async with database.write() as session:
            await session.execute(select(VectorStoreRow))
            await asyncio.sleep(0.01)
            session.add(a_store(number))

    await asyncio.gather(*(add(number) for number in range(8)))
    async with database.read() as session:
        assert len((await session.scalars(select(VectorStoreRow))).all()) == 8


async def test_a_reader_of_sqlite_sees_one_state(tmp_path: Path):
    database = Database.in_folder(tmp_path)
    await database.migrate()
    async with database.read() as session:
        assert (await session.scalars(select(VectorStoreRow))).all() == []
        async with database.write() as writing:
            writing.add(a_store(1))
        assert (await session.scalars(select(VectorStoreRow))).all() == []
    await database.close()


async def test_a_glance_sees_what_others_have_just_written(database: Database):
    query = select(VectorStoreRow.__table__).order_by(VectorStoreRow.created.desc())
    assert await database.glance(query) is None
    for number in (1, 2):
        async with database.write() as session:
            session.add(a_store(number))
        found = await asyncio.gather(*(database.glance(query) for _ in range(5)))
        assert [each and each.id for each in found] == [f"vs_{number}"] * 5


async def test_a_glance_goes_on_after_its_connection_was_lost_or_its_caller_left(
    database: Database,
):
    query = select(VectorStoreRow.__table__)
    assert await database.glance(query) is None
    assert database._kept is not None
    raw = await database._kept.get_raw_connection()
    assert raw.driver_connection is not None
    if database.is_shared:
        raw.driver_connection.terminate()
    else:
        await raw.driver_connection.close()
    assert await database.glance(query) is None
    for _ in range(20):
        task = asyncio.create_task(database.glance(query))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await database.glance(query) is None


async def test_an_absent_server_is_named(postgres: str):
    away = Database("postgresql://rapid@127.0.0.1:1/postgres")
    with pytest.raises(LibraryUnavailable, match="does not answer"):
        await away.migrate()


async def test_what_is_deleted_leaves_no_bytes(tmp_path: Path):
    database = Database.in_folder(tmp_path)
    await database.migrate()
    row = a_store(1)
    row.name = "a secret name"
    async with database.write() as session:
        session.add(row)
    assert holds(tmp_path, b"a secret name")
    async with database.write() as session:
        await session.delete(await session.get_one(VectorStoreRow, "vs_1"))
    await database.forget_deleted()
    assert not holds(tmp_path, b"a secret name")
    await database.close()


async def test_what_another_transaction_may_see_is_not_gone(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("library.storage.database._OLDER_S", 0.2)
    async with database.write() as session:
        session.add(a_store(1))
    async with database.read() as reader:
        if database.is_shared:  # a backup, say
            await reader.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        await reader.execute(select(VectorStoreRow))
        async with database.write() as session:
            await session.delete(await session.get_one(VectorStoreRow, "vs_1"))
        assert not (await database.forget_deleted())[1]
        assert not (await database.forget_deleted())[1]
    assert (await database.forget_deleted())[1]


def holds(folder: Path, words: bytes) -> bool:
    """Whether the words stand in a file of the folder."""
    return any(words in each.read_bytes() for each in folder.rglob("*") if each.is_file())
