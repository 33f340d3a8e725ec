"""Files and vector stores through OpenAI's SDK, over a library and a scripted orchestrator."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.api.files import file_routes
from deployments.api.ingress import Ingress
from deployments.config.api_config import ApiConfig, ApiKey
from deployments.config.tenants import hash_key
from library.ingestion import Ingestion
from library.library_access import LibraryAccess
from library.library_config import LibraryConfig
from library.storage.database import Database
from rapid.chat_messages import Document, DocumentRef
from retrieval import RetrievalConfig
from retrieval.chunking import Chunk, RetrievedChunk
from retrieval.indexing import cut_document, key_of
from tests.deployments.scripted import ScriptedOrchestrator
from tests.library.conftest import empty
from tests.library.libraries import FakeIndex
from tests.library.parsing.small_pdf import write_pdf

TEXT = "\n".join(f"The code of door {number} is {number * 7}." for number in range(40))


class Searching(ScriptedOrchestrator):
    """Answers searches by the words that passages share with the query."""

    def __init__(self, library: LibraryAccess) -> None:
        super().__init__()
        self._library = library

    async def list_chunks(
        self, tenant: str, document: DocumentRef, first: int, count: int
    ) -> list[Chunk]:
        (text,) = await self._library.resolve(tenant, [document])
        return _cut(tenant, text)[first : first + count]

    async def search(
        self, tenant: str, documents: Sequence[DocumentRef], query: str, num_results: int
    ) -> list[RetrievedChunk]:
        asked = set(re.findall(r"\w+", query))
        texts = await self._library.resolve(tenant, documents)
        chunks = [each for text in texts for each in _cut(tenant, text)]
        found = [
            RetrievedChunk(**asdict(each), score=len(asked & set(re.findall(r"\w+", each.text))))
            for each in chunks
        ]
        return sorted(found, key=lambda each: -each.score)[:num_results]


def _cut(tenant: str, text: Document) -> list[Chunk]:
    def words(text: str) -> list[tuple[int, int]]:
        return [match.span() for match in re.finditer(r"\S+\s*", text)]

    return cut_document(text, RetrievalConfig(chunk_tokens=64), words, key_of(tenant, text)[1])


class World:
    """An ingress over a library whose files are read when `ingest` says so."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.access = LibraryAccess(LibraryConfig(folder=folder, **config))
        self.service = Searching(self.access)
        self.has_servers = "database" in config
        self.index = FakeIndex()
        keys = [ApiKey(tenant=each, sha256=hash_key(f"sk-{each}")) for each in "ab"]
        self.config = ApiConfig(model="m", keys=keys)
        self.app = Ingress(self.service, self.config, library=self.access)

    def client(self, tenant: str = "a") -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app))
        return openai.AsyncOpenAI(
            api_key=f"sk-{tenant}", base_url="http://127.0.0.1/v1", http_client=http, max_retries=0
        )

    async def ingest(self) -> None:
        await Ingestion(await self.access.get(), self.index).drain()

    async def upload(self, text: str = TEXT, name: str = "doors.txt", tenant: str = "a") -> str:
        file = (name, io.BytesIO(text.encode()))
        return (await self.client(tenant).files.create(file=file, purpose="user_data")).id


@pytest.fixture(params=["folder", pytest.param("servers", marks=pytest.mark.slow)])
async def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    """A world of one node, in a folder, or of several, in PostgreSQL and S3."""
    monkeypatch.setattr(file_routes, "_FORGETTING_S", 0.0)  # nothing works in the background here
    places: dict[str, str] = {}
    if request.param == "servers":
        url = request.getfixturevalue("postgres")
        database = Database(url)
        await empty(database)
        await database.close()
        blobs = f"{request.getfixturevalue('s3').url}/{tmp_path.name}"
        places = {"database": url, "blobs": blobs}
    world = World(tmp_path, max_file_bytes=200_000, max_files=6, **places)
    yield world
    await (await world.access.get()).close()


async def ask(world: World, tenant: str = "a", **rapid: Any) -> Any:
    return await world.client(tenant).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Which?"}], extra_body={"rapid": rapid}
    )


class TestFiles:
    async def test_a_file_is_kept_listed_read_and_deleted(self, world: World):
        client = world.client()
        file = await client.files.create(
            file=("doors.txt", TEXT.encode()),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (file.bytes, file.filename, file.status) == (len(TEXT), "doors.txt", "uploaded")
        assert file.expires_at == file.created_at + 3600
        await world.ingest()
        assert (await client.files.retrieve(file.id)).status == "processed"
        assert (await client.files.content(file.id)).text == TEXT
        assert [each.id async for each in client.files.list()] == [file.id]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        assert [each.id async for each in client.files.list()] == []

    async def test_a_deletion_says_where_it_looked_and_whether_all_is_gone(self, world: World):
        client = world.client()
        file_id = await world.upload()
        await world.ingest()
        asked = await client.files.delete(file_id)
        assert asked.model_extra == {"rapid": {"state": "pending", "searched": []}}
        await world.ingest()
        again = await client.files.delete(file_id)
        assert again.deleted
        assert again.model_extra is not None
        certificate = again.model_extra["rapid"]
        assert certificate["state"] == "gone"
        removed = {each["place"]: each["removed"] for each in certificate["searched"]}
        assert removed["files"] == 3
        # SQLite's log is searched; a server's log is its operator's, and the answer says so.
        log = "(its log and its backups are the operator's)" if world.has_servers else "and its log"
        assert {"index", "librarian: texts", f"database {log}"} <= removed.keys()
        assert not any("pending" in each for each in certificate["searched"])
        with pytest.raises(openai.NotFoundError):
            await world.client("b").files.delete(file_id)

    async def test_a_file_may_be_read_by_the_target_in_advance(self, world: World):
        client = world.client()
        file = await client.files.create(
            file=("doors.txt", TEXT.encode()), purpose="user_data", extra_body={"prefill": True}
        )
        assert file.model_extra is not None
        assert file.model_extra["rapid"]["prefill"] == "queued"
        await world.ingest()
        (found,) = [each async for each in client.files.list()]
        assert found.model_extra is not None
        assert found.model_extra["rapid"]["prefill"] == "failed"
        assert "no target" in found.model_extra["rapid"]["prefill_details"]
        with pytest.raises(openai.BadRequestError, match="true or false"):
            await client.files.create(
                file=("a", b"x"), purpose="user_data", extra_body={"prefill": "soon"}
            )

    async def test_pages_of_a_list_follow_their_cursor(self, world: World):
        ids = [await world.upload(name=f"{number}.txt") for number in range(5)]
        listed = [each.id async for each in world.client().files.list(limit=2, order="asc")]
        assert listed == ids
        assert [each.id async for each in world.client().files.list(limit=2)] == ids[::-1]

    async def test_another_tenant_sees_nothing(self, world: World):
        file_id = await world.upload()
        other = world.client("b")
        for call in (
            other.files.retrieve(file_id),
            other.files.content(file_id),
            other.files.delete(file_id),
            other.vector_stores.create(file_ids=[file_id]),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert [each async for each in other.files.list()] == []

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("empty.txt", b"", "is empty"),
            ("a\u202eb.txt", b"x", "file's name"),
            ("../up.txt", b"x", "file's name"),
            ("n" * 300, b"x", "255 bytes"),
            ("long.txt", b"x" * 200_001, "split it"),
        ],
    )
    async def test_a_bad_file_is_refused_and_leaves_nothing(
        self, world: World, tmp_path: Path, name: str, content: bytes, says: str
    ):
        form = {"purpose": (None, "user_data"), "file": (name, content)}
        response = await self._post(world, form)
        assert response.status_code in (400, 413)
        assert says in response.json()["error"]["message"]
        assert [each async for each in world.client().files.list()] == []
        library = await world.access.get()
        assert await library.blobs.list_blobs() == []

    async def test_a_form_without_a_file_or_purpose_says_so(self, world: World):
        response = await self._post(world, {"purpose": (None, "user_data")})
        assert response.json()["error"]["param"] == "file"
        response = await self._post(world, {"purpose": (None, "fun"), "file": ("a", b"x")})
        assert "'user_data'" in response.json()["error"]["message"]

    async def test_a_form_over_the_limit_is_not_read_to_its_end(self, world: World):
        form = {"purpose": (None, "user_data"), "file": ("a", b"x" * 400_000)}
        response = await self._post(world, form)
        assert response.status_code == 413

    async def test_a_tenant_has_a_limit_of_files(self, world: World):
        for number in range(6):
            await world.upload(name=f"{number}.txt")
        with pytest.raises(openai.BadRequestError, match="which is the most"):
            await world.upload()
        await world.upload(tenant="b")

    async def _post(self, world: World, form: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(world.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            headers = {"authorization": "Bearer sk-a"}
            return await http.post("/v1/files", files=form, headers=headers)


class TestVectorStores:
    async def test_a_store_says_how_far_its_files_are(self, world: World):
        client = world.client()
        file_id = await world.upload()
        store = await client.vector_stores.create(
            name="doors",
            file_ids=[file_id],
            metadata={"role": "keys"},
            expires_after={"anchor": "last_active_at", "days": 2},
        )
        assert (store.status, store.file_counts.in_progress) == ("in_progress", 1)
        with pytest.raises(openai.ConflictError, match="still being indexed"):
            await client.vector_stores.search(store.id, query="door 3")
        await world.ingest()
        store = await client.vector_stores.retrieve(store.id)
        assert (store.status, store.file_counts.completed) == ("completed", 1)
        assert store.usage_bytes == len(TEXT)
        assert store.expires_at == store.last_active_at + 2 * 86400
        renamed = await client.vector_stores.update(store.id, name="all doors")
        assert (renamed.name, renamed.metadata) == ("all doors", {"role": "keys"})
        assert [each.id async for each in client.vector_stores.list()] == [store.id]
        assert (await client.vector_stores.delete(store.id)).deleted
        assert (await client.files.retrieve(file_id)).status == "processed"

    async def test_a_file_says_how_far_the_work_on_it_is(self, world: World):
        client, jobs = world.client(), (await world.access.get()).jobs
        file_id = await world.upload()
        store = await client.vector_stores.create(file_ids=[file_id])

        async def look() -> list[dict[str, Any]]:
            file = await client.files.retrieve(file_id)
            of_store = await client.vector_stores.files.retrieve(file_id, vector_store_id=store.id)
            told = [(each.model_extra or {}).get("rapid", {}) for each in (file, of_store)]
            return [{key: each[key] for key in ("done", "of") if key in each} for each in told]

        held = []
        for kind, done, of in ("read", 3, 9), ("index", 20, 64):  # pages, then passages
            job = await jobs.claim("a worker")
            assert job is not None
            assert job.kind == kind
            job.num_done, job.num_all = done, of
            await jobs.renew(job)
            assert await look() == [{"done": done, "of": of}] * 2
            held.append(job)
        for job in held:
            await jobs.postpone(job, 0)
        await world.ingest()
        assert await look() == [{}, {}]

    async def test_a_search_says_where_a_passage_stands(self, world: World):
        client = world.client()
        store = await client.vector_stores.create(file_ids=[await world.upload()])
        await world.ingest()
        found = await client.vector_stores.search(store.id, query="door 33", max_num_results=2)
        best, _ = found.data
        assert "The code of door 33 is 231." in best.content[0].text
        place = best.model_extra["rapid"]
        assert TEXT[place["start"] : place["end"]] == best.content[0].text
        assert place["lines"][0] <= 34 <= place["lines"][1]

    async def test_searches_and_lists_of_passages_count_into_quotas(self, world: World):
        client = world.client()
        file_id = await world.upload()
        store = await client.vector_stores.create(file_ids=[file_id])
        await world.ingest()
        world.app.configure(world.config.model_copy(update={"requests_per_minute": 2}))
        search = client.vector_stores.with_raw_response.search
        found = await search(store.id, query="door 33")
        assert found.headers["x-ratelimit-remaining-requests"] == "1"
        chunks = f"/vector_stores/{store.id}/files/{file_id}/chunks"
        assert (await client.get(chunks, cast_to=httpx.Response)).status_code == 200
        with pytest.raises(openai.RateLimitError):
            await search(store.id, query="door 33")
        with pytest.raises(openai.RateLimitError):
            await client.get(chunks, cast_to=httpx.Response)

    async def test_a_text_says_where_its_pages_begin(self, world: World):
        client = world.client()
        pdf = io.BytesIO(write_pdf([[(72.0, 720.0, each)] for each in ("One.", "Two.")]))
        file = await client.files.create(file=("a.pdf", pdf), purpose="user_data")
        store = await client.vector_stores.create(file_ids=[file.id, await world.upload()])
        await world.ingest()
        async for each in client.vector_stores.files.list(store.id):
            page = await client.vector_stores.files.content(each.id, vector_store_id=store.id)
            (part,), starts = page.data, page.model_extra["rapid"]["pages"]
            if each.id == file.id:
                assert [part.text[start : start + 4] for start in starts] == ["One.", "Two."]
            else:
                assert starts == []

    async def test_attributes_choose_files(self, world: World):
        client = world.client()
        store = await client.vector_stores.create()
        for year in (2024, 2025):
            file_id = await world.upload(f"door of {year}", f"{year}.txt")
            await client.vector_stores.files.create(
                file_id=file_id, vector_store_id=store.id, attributes={"year": year}
            )
        await world.ingest()
        newer = {"type": "gt", "key": "year", "value": 2024}
        found = await client.vector_stores.search(store.id, query="door", filters=newer)
        assert [each.filename for each in found.data] == ["2025.txt"]
        both = {"type": "or", "filters": [newer, {"type": "eq", "key": "year", "value": 2024}]}
        found = await client.vector_stores.search(store.id, query="door", filters=both)
        assert len(found.data) == 2
        unknown = {"type": "eq", "key": "yaer", "value": 2024}
        with pytest.raises(openai.BadRequestError, match="has an attribute 'yaer'"):
            await client.vector_stores.search(store.id, query="door", filters=unknown)

    async def test_passages_can_be_looked_at(self, world: World):
        client = world.client()
        file_id = await world.upload()
        static = {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}
        store = await client.vector_stores.create(
            file_ids=[file_id], chunking_strategy={"type": "static", "static": static}
        )
        await world.ingest()
        file = await client.vector_stores.files.retrieve(file_id, vector_store_id=store.id)
        assert file.chunking_strategy.static.chunk_overlap_tokens == 0
        (found,) = await (await world.access.get()).documents.find_in_store("a", store.id)
        (indexed,) = world.index.documents.values()
        assert indexed.ref == found.ref  # else a search would index it again
        path = f"/vector_stores/{store.id}/files/{file_id}/chunks"
        whole = await client.get(path, cast_to=dict[str, Any])
        chunks = whole["data"]
        assert "".join(each["content"][0]["text"] for each in chunks) == TEXT
        assert not whole["has_more"]
        paged, after = [], ""
        while True:
            page = await client.get(f"{path}?limit=2{after}", cast_to=dict[str, Any])
            paged += page["data"]
            assert len(page["data"]) == 2 or not page["has_more"]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert paged == chunks
        for unknown in ("nothing", f"{file_id}:1", f"{chunks[0]['id']}x"):
            with pytest.raises(openai.BadRequestError, match="after: there is no"):
                await client.get(f"{path}?after={unknown}", cast_to=dict[str, Any])
        assert all(64 < each["tokens"] <= 100 for each in chunks[:-1])
        text = await client.vector_stores.files.content(file_id, vector_store_id=store.id)
        assert text.data[0].text == TEXT

    @pytest.mark.parametrize(("tokens", "overlap"), [(800, 400), (100, 50), (100, 20)])
    async def test_passages_begin_with_the_end_of_the_one_before(
        self, world: World, tokens: int, overlap: int
    ):
        client = world.client()
        file_id = await world.upload(TEXT * 5)
        static = {"max_chunk_size_tokens": tokens, "chunk_overlap_tokens": overlap}
        store = await client.vector_stores.create(
            file_ids=[file_id], chunking_strategy={"type": "static", "static": static}
        )
        await world.ingest()
        file = await client.vector_stores.files.retrieve(file_id, vector_store_id=store.id)
        assert (file.status, file.chunking_strategy.static.model_dump()) == ("completed", static)
        path = f"/vector_stores/{store.id}/files/{file_id}/chunks"
        chunks = (await client.get(path, cast_to=dict[str, Any]))["data"]
        texts = {(each["rapid"]["start"], each["rapid"]["end"]): each for each in chunks}
        for (start, end), each in texts.items():
            assert each["content"][0]["text"] == (TEXT * 5)[start:end]
            assert each["tokens"] <= tokens
        for (_, end), (start, _) in itertools.pairwise(texts):
            assert len((TEXT * 5)[start:end].split()) == overlap
        found = await client.vector_stores.search(store.id, query="door 7", max_num_results=2)
        for hit in found.data:
            assert hit.content[0].text in {each["content"][0]["text"] for each in chunks}

    async def test_an_overlap_of_more_than_half_is_refused(self, world: World):
        static = {"max_chunk_size_tokens": 800, "chunk_overlap_tokens": 401}
        with pytest.raises(openai.BadRequestError, match="must be at most half"):
            await world.client().vector_stores.create(
                chunking_strategy={"type": "static", "static": static}
            )
        assert [each async for each in world.client().vector_stores.list()] == []

    async def test_a_batch_can_be_given_up(self, world: World):
        client = world.client()
        store = await client.vector_stores.create()
        ids = [await world.upload(name=f"{number}.txt") for number in range(3)]
        batches = client.vector_stores.file_batches
        batch = await batches.create(store.id, file_ids=ids)
        assert (batch.status, batch.file_counts.total) == ("in_progress", 3)
        batch = await batches.cancel(batch.id, vector_store_id=store.id)
        assert (batch.status, batch.file_counts.cancelled) == ("cancelled", 3)
        await world.ingest()
        listed = batches.list_files(batch.id, vector_store_id=store.id)
        assert [each.status async for each in listed] == ["cancelled"] * 3

    async def test_a_file_leaves_its_store_and_stays(self, world: World):
        client = world.client()
        file_id = await world.upload()
        store = await client.vector_stores.create(file_ids=[file_id])
        gone = await client.vector_stores.files.delete(file_id, vector_store_id=store.id)
        assert gone.deleted
        await world.ingest()
        assert (await client.files.retrieve(file_id)).status == "processed"
        assert (await client.vector_stores.retrieve(store.id)).file_counts.total == 0

    async def test_bad_bodies_name_the_field(self, world: World):
        client = world.client()
        for body, param in (
            ({"nmae": "x"}, "nmae"),
            ({"expires_after": {"anchor": "last_active_at", "days": 0}}, "expires_after.days"),
            ({"file_ids": "file-1"}, "file_ids"),
            ({"metadata": {"k": "v" * 513}}, "metadata"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.post("/vector_stores", body=body, cast_to=dict[str, Any])
            assert refused.value.param == param


class TestChat:
    async def test_a_question_names_files_and_stores(self, world: World):
        one, two = await world.upload("one", "1.txt"), await world.upload("two", "2.txt")
        store = await world.client().vector_stores.create(file_ids=[two])
        with pytest.raises(openai.ConflictError, match="still being read"):
            await ask(world, file_ids=[one])
        await world.ingest()
        await ask(world, file_ids=[one], vector_store_ids=[store.id])
        (sent,) = world.service.requests
        assert [each.name for each in sent.documents] == ["1.txt", "2.txt"]
        texts = await world.access.resolve("a", sent.documents)
        assert [each.text for each in texts] == ["one", "two"]

    async def test_a_file_may_be_a_part_of_a_message(self, world: World):
        file_id = await world.upload("one", "1.txt")
        await world.ingest()
        parts = [
            {"type": "file", "file": {"file_id": file_id}},
            {"type": "text", "text": "Which?"},
        ]
        await world.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": parts}]
        )
        (sent,) = world.service.requests
        assert [each.name for each in sent.documents] == ["1.txt"]
        assert sent.messages[0].text == "Which?"

    async def test_another_tenants_ids_are_unknown(self, world: World):
        file_id = await world.upload()
        store = await world.client().vector_stores.create(file_ids=[file_id])
        await world.ingest()
        for named in ({"file_ids": [file_id]}, {"vector_store_ids": [store.id]}):
            with pytest.raises(openai.NotFoundError):
                await ask(world, "b", **named)

    async def test_a_server_without_a_library_says_so(self):
        app = Ingress(ScriptedOrchestrator(), ApiConfig(model="m"))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        client = openai.AsyncOpenAI(api_key="x", base_url="http://127.0.0.1/v1", http_client=http)
        with pytest.raises(openai.NotFoundError, match="keeps no files"):
            await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "Which?"}],
                extra_body={"rapid": {"file_ids": ["file-1"]}},
            )
