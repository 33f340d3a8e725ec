import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from library.library_access import Library
from library.library_config import LibraryConfig
from library.storage.blobs import Blobs
from library.storage.database import Database
from tests.library.object_store import ObjectStore
from tests.library.postgres import run_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with run_postgres() as url:
        yield url


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    server = ObjectStore(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def s3(s3_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A running S3 server, with its credentials in the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


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


@pytest.fixture
def library(database: Database, request: pytest.FixtureRequest, tmp_path: Path) -> Library:
    """A library of one node, in a folder, or of several, in PostgreSQL and S3."""
    blobs = Blobs.in_folder(tmp_path / "files")
    if database.is_shared:
        s3: ObjectStore = request.getfixturevalue("s3")
        blobs = Blobs.at(f"{s3.url}/{secrets.token_hex(4)}")
    return Library.over(LibraryConfig(folder=tmp_path), database, blobs)


async def empty(database: Database) -> None:
    from sqlalchemy import text

    async with database.write() as session:
        await session.execute(text("DROP SCHEMA public CASCADE"))
        await session.execute(text("CREATE SCHEMA public"))
