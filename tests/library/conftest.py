from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from library.database import Database
from tests.library.postgres import run_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with run_postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """A migrated, empty database of either kind."""
    if request.param == "sqlite":
        database = Database.in_folder(tmp_path)
    else:
        database = Database(request.getfixturevalue("postgres"))
        await empty(database)
    await database.migrate()
    yield database
    await database.close()


async def empty(database: Database) -> None:
    from sqlalchemy import text

    async with database.write() as session:
        await session.execute(text("DROP SCHEMA public CASCADE"))
        await session.execute(text("CREATE SCHEMA public"))
