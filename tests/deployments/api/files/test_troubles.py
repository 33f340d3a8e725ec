"""What files and stores answer to bad input, and while something is away or full.

Each is an error in OpenAI's form that says what to do, and what was kept before is there after it.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from library.library_config import LibraryConfig
from library.parsing import ParsingLimits
from library.storage.blobs import Blobs
from library.upkeep import verify
from tests.deployments.api.files.test_files_by_sdk import TEXT, World, ask
from tests.deployments.api.fuzzing import read_here
from tests.library.conftest import empty, postgres
from tests.library.parsing.test_docx import pack

__all__ = ["postgres"]


class Line:
    """A line to a server on this machine that can be cut, or go silent."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_silent = False
        self._server: asyncio.Server | None = None
        self._joining = 0
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.own_port = 0

    async def open(self) -> None:
        self.is_silent = False
        self._server = await asyncio.start_server(self._join, "127.0.0.1", self.own_port)
        self.own_port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        while self._joining:  # noqa: ASYNC110 (so that no end is left over)
            await asyncio.sleep(0.001)
        for each in self._ends:
            each.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ends.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._joining += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._joining -= 1
        self._ends |= {writer, there_writer}
        for pair in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass_on(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(65536):
            while self.is_silent:  # noqa: ASYNC110 (until it is cut)
                await asyncio.sleep(0.01)
            writer.write(part)
        writer.close()


def refusal(error: openai.APIStatusError) -> tuple[int, Any, Any]:
    return error.status_code, error.code, error.param


async def names(world: World) -> list[str]:
    return [each.filename async for each in world.client().files.list()]


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    read_here(monkeypatch)
    world = World(tmp_path, max_file_bytes=200_000)
    yield world
    await (await world.access.get()).close()


class TestBadFiles:
    @pytest.mark.parametrize(
        ("name", "content", "code", "says"),
        [
            ("old.rtf", b"{\\rtf1 old}", "unsupported_file", "Save it as DOCX"),
            ("picture.png", b"\x89PNG\r\n\x1a\n\0\0\0", "unsupported_file", "Use plain text"),
            ("shut.docx", "EncryptedPackage", "encrypted_file", "Remove its password"),
            ("broken.pdf", b"%PDF-1.7\nbroken", "broken_file", "save it again"),
            ("bomb.docx", "bomb", "file_too_large", "Split it"),
            ("blank.txt", b" \n\t\n ", "empty_file", "has no text"),
        ],
    )
    async def test_what_cannot_be_read_says_why_wherever_it_is_asked_for(
        self,
        world: World,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        content: bytes | str,
        code: str,
        says: str,
    ):
        small = ParsingLimits(unpacked_bytes=500_000)
        monkeypatch.setattr(LibraryConfig, "parsing_limits", property(lambda _: small))
        if isinstance(content, str):
            bomb = pack(f"<w:p><w:r><w:t>{'a' * 1_000_000}</w:t></w:r></w:p>")
            content = bomb if content == "bomb" else _shut(content)
        client, good = world.client(), await world.upload("Good.", "good.txt")
        bad = (await client.files.create(file=(name, content), purpose="user_data")).id
        store = (await client.vector_stores.create(file_ids=[good, bad])).id
        await world.ingest()
        file = await client.files.retrieve(bad)
        assert (file.status, file.model_extra["rapid"]["error_code"]) == ("error", code)
        assert says in str(file.status_details)
        entry = await client.vector_stores.files.retrieve(bad, vector_store_id=store)
        assert entry.status == "failed"
        assert entry.last_error is not None
        assert (entry.last_error.code, says in entry.last_error.message) == (code, True)
        with pytest.raises(openai.ConflictError, match="could not be read") as refused:
            await ask(world, file_ids=[bad])
        assert refusal(refused.value) == (409, code, "file_id")
        found = await client.vector_stores.search(store, query="Good")
        assert [each.filename for each in found.data] == ["good.txt"]
        assert await verify(await world.access.get(), young_s=-1.0) == []

    async def test_the_same_file_twice_is_two_files_and_one_of_a_store(self, world: World):
        ids = [await world.upload(), await world.upload()]
        assert len(set(ids)) == 2
        store = await world.client().vector_stores.create(file_ids=[*ids, *ids])
        assert store.file_counts.total == 2
        await world.client().vector_stores.files.create(file_id=ids[0], vector_store_id=store.id)
        assert (await world.client().vector_stores.retrieve(store.id)).file_counts.total == 2

    async def test_an_address_is_not_fetched(self, world: World):
        asked: list[int] = []

        async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(1)
            writer.close()

        listener = await asyncio.start_server(note, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/secret"
        form = {"purpose": (None, "user_data"), "file": (None, url)}
        response = await post(world, form)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
        for part in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "file", "file": {"file_url": url}},
            {"type": "file", "file": {"file_data": "data:text/plain;base64,YQ=="}},
        ):
            content: Any = [part, {"type": "text", "text": "Which?"}]
            with pytest.raises(openai.BadRequestError) as refused:
                await world.client().chat.completions.create(
                    model="m", messages=[{"role": "user", "content": content}]
                )
            assert str(refused.value.param).startswith("messages[0]")
        page = f"<html><img src='{url}'><iframe src='{url}'></iframe><a href='{url}'>x</a></html>"
        await world.upload(page, "page.html")
        await world.upload(url, "address.txt")
        await world.ingest()
        assert {each.status async for each in world.client().files.list()} == {"processed"}
        listener.close()
        assert asked == []

    async def test_what_a_search_would_not_do_is_refused(self, world: World):
        store = await world.client().vector_stores.create(file_ids=[await world.upload()])
        await world.ingest()
        search = world.client().vector_stores.search
        for options, param in (
            ({"rewrite_query": True}, "rewrite_query"),
            ({"ranking_options": {"ranker": "best"}}, "ranking_options.ranker"),
            ({"query": " "}, "query"),
            ({"query": ["door"] * 10_000}, "query"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await search(store.id, **({"query": "door"} | options))
            assert refused.value.param == param
        usual = {"ranker": "auto", "score_threshold": 0.5}
        found = await search(
            store.id, query=["door", "33"], rewrite_query=False, ranking_options=usual
        )
        assert found.search_query == ["door\n33"]
        assert found.data

    @pytest.mark.parametrize("charset", ["undefined", "punycode", "idna", "utf-8"])
    async def test_a_form_of_any_charset_is_read_or_refused(self, world: World, charset: str):
        body = (
            b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
            b'--x\r\ncontent-disposition: form-data; name="file"; filename="xn--\xff\xfe"\r\n\r\n'
            b"text\r\n--x--\r\n"
        )
        headers = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
        response = await post(world, None, content=body, headers=headers)
        assert response.status_code in (200, 400)
        assert (await post(world, None, content=body)).status_code == 400

    @pytest.mark.parametrize(
        ("path", "param"),
        [
            (f"/files?limit={'9' * 5000}", "limit"),
            ("/vector_stores?order=up", "order"),
            ("/files?after=%00", None),
            ("/vector_stores?before=%ED%A0%80", "before"),
        ],
    )
    async def test_odd_queries_are_refused(self, world: World, path: str, param: str | None):
        with pytest.raises(openai.BadRequestError) as refused:
            await world.client().get(path, cast_to=dict[str, Any])
        assert param is None or refused.value.param == param

    async def test_odd_values_are_refused(self, world: World):
        file_id = await world.upload()
        store = (await world.client().vector_stores.create()).id
        for path, body in (
            ("", b'{"name": "\\ud800"}'),
            ("", b'{"name": "a\\u0000b"}'),
            ("", b'{"file_ids": ["\\ud800"]}'),
            (f"/{store}/files", b'{"file_id": "\\ud800"}'),
            (f"/{store}/files", b'{"file_id": "FILE", "attributes": {"a": NaN}}'),
            (f"/{store}/files", b'{"file_id": "FILE", "attributes": {"a": "\\udfff"}}'),
        ):
            content = body.replace(b"FILE", file_id.encode())
            headers = {"content-type": "application/json"}
            response = await post(
                world, None, f"/v1/vector_stores{path}", content=content, headers=headers
            )
            assert (body, response.status_code) == (body, 400)
            assert response.json()["error"]["message"]


class TestAway:
    async def test_a_database_that_is_away_at_the_start_is_asked_again(
        self, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        async with cut_world(postgres, tmp_path, monkeypatch) as (line, world):
            client = world.client()
            for call in (
                world.upload(),
                client.files.retrieve("file-1"),
                client.vector_stores.create(),
                ask(world, file_ids=["file-1"]),
            ):
                with pytest.raises(openai.InternalServerError, match="does not answer") as refused:
                    await call
                assert refusal(refused.value) == (503, "library_unavailable", None)
                assert refused.value.response.headers["retry-after"]
            assert (await ask(world)).choices
            await line.open()
            await world.upload()
            assert await names(world) == ["doors.txt"]

    async def test_a_database_that_goes_and_comes_back_has_what_was_acknowledged(
        self, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        async with cut_world(postgres, tmp_path, monkeypatch) as (line, world):
            await line.open()
            kept = await world.upload(name="kept.txt")
            for _ in range(3):
                await line.cut()
                with pytest.raises(openai.InternalServerError, match="does not answer"):
                    await world.upload(name="lost.txt")
                with pytest.raises(openai.InternalServerError, match="does not answer"):
                    await world.client().files.delete(kept)
                await line.open()
                assert await names(world) == ["kept.txt"]
            await world.ingest()
            await ask(world, file_ids=[kept])
            assert await verify(await world.access.get(), young_s=-1.0) == []

    async def test_a_database_that_says_nothing_is_not_waited_for_without_end(
        self, postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("library.storage.database._WAIT_S", 2.0)
        async with cut_world(postgres, tmp_path, monkeypatch) as (line, world):
            await line.open()
            await world.upload()
            line.is_silent = True
            async with asyncio.timeout(30):
                with pytest.raises(openai.InternalServerError, match="does not answer"):
                    await names(world)
            await line.cut()
            await line.open()
            assert await names(world) == ["doors.txt"]

    async def test_blobs_that_are_away_are_named_and_nothing_is_kept(
        self, world: World, tmp_path: Path
    ):
        kept = await world.upload(name="kept.txt")
        blobs, away = tmp_path / "files", tmp_path / "away"
        blobs.rename(away)
        blobs.write_bytes(b"no folder")
        with pytest.raises(openai.InternalServerError, match="store of files") as refused:
            await world.upload(name="lost.txt")
        assert refusal(refused.value) == (503, "library_unavailable", None)
        with pytest.raises(openai.APIStatusError):
            await world.client().files.content(kept)
        blobs.unlink()
        away.rename(blobs)
        assert await names(world) == ["kept.txt"]
        assert (await world.client().files.content(kept)).text == TEXT

    async def test_bytes_that_are_gone_are_said_to_be(self, world: World):
        file_id = await world.upload()
        await world.ingest()
        library = await world.access.get()
        await library.blobs.delete([each.name for each in await library.blobs.list_blobs()])
        with pytest.raises(openai.NotFoundError, match="upload it again"):
            await world.client().files.content(file_id)

    async def test_an_index_that_is_away_is_a_503_of_search(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ):
        from rapid.errors import RetrievalUnavailable

        async def fail(*_: Any) -> Any:
            raise RetrievalUnavailable("Qdrant does not answer: try again.")

        store = await world.client().vector_stores.create(file_ids=[await world.upload()])
        await world.ingest()
        monkeypatch.setattr(world.service, "search", fail)
        with pytest.raises(openai.InternalServerError, match="Qdrant") as refused:
            await world.client().vector_stores.search(store.id, query="door")
        assert refusal(refused.value) == (503, "retrieval_unavailable", None)


class TestFull:
    async def test_a_full_disk_takes_nothing_and_loses_nothing(self, tiny_disk: Path):
        world = World(tiny_disk / "library")
        kept = await world.upload(name="kept.txt")
        ballast = tiny_disk / "ballast"
        with pytest.raises(OSError, match="No space"):
            fill(ballast)
        with pytest.raises(openai.InternalServerError, match="disk is full") as refused:
            await world.upload("x" * 50_000, name="lost.txt")
        assert refusal(refused.value) == (507, "library_full", None)
        assert await names(world) == ["kept.txt"]
        assert (await world.client().files.content(kept)).text == TEXT
        ballast.unlink()
        await world.upload("x" * 50_000, name="later.txt")
        library = await world.access.get()
        assert await verify(library, young_s=-1.0) == []
        await library.close()

    async def test_a_full_database_takes_nothing_and_loses_nothing(self, world: World):
        await world.upload(name="kept.txt")
        library = await world.access.get()
        from sqlalchemy import event

        def bound(connection: Any, *_: Any) -> None:
            connection.execute("PRAGMA max_page_count = 1").close()  # no less than it has

        engine = library.database._engine
        await engine.dispose()
        event.listen(engine.sync_engine, "connect", bound)
        with pytest.raises(openai.InternalServerError, match="disk is full") as refused:
            await upload_many(world)
        assert refusal(refused.value) == (507, "library_full", None)
        event.remove(engine.sync_engine, "connect", bound)
        await engine.dispose()
        assert "kept.txt" in await names(world)
        assert await verify(library, young_s=-1.0) == []

    async def test_a_full_disk_for_uploads_is_named(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ):
        async def write(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("starlette.datastructures.UploadFile.write", write)
        with pytest.raises(openai.InternalServerError, match="disk for uploads") as refused:
            await world.upload()
        assert refusal(refused.value) == (507, "library_full", None)
        assert await names(world) == []


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def upload_many(world: World) -> None:
    for number in range(200):
        await world.upload(name=f"{number:0100}.txt")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own of a megabyte, where tests may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@asynccontextmanager
async def cut_world(
    postgres: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Line, World]]:
    """A world whose database is behind a line, which is cut."""
    from library.storage.database import Database

    read_here(monkeypatch)
    emptied = Database(postgres)
    await empty(emptied)
    await emptied.close()
    line = Line(int(postgres.partition("127.0.0.1:")[2].partition("/")[0]))
    await line.open()
    await line.cut()
    monkeypatch.setattr(Blobs, "at", lambda _: Blobs.in_folder(folder / "blobs"))
    world = World(folder)
    url = postgres.replace(f":{line.port}/", f":{line.own_port}/")
    config = LibraryConfig(folder=folder, database=url, blobs="s3://elsewhere")
    world.access._config = config
    yield line, world
    await (await world.access.get()).close()
    await line.cut()


async def post(
    world: World, form: dict[str, Any] | None, path: str = "/v1/files", **sent: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(world.app)
    headers = {"authorization": "Bearer sk-a"} | sent.pop("headers", {})
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        return await http.post(path, files=form, headers=headers, **sent)


def _shut(stream: str) -> bytes:
    return b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600) + stream.encode("utf-16-le")
