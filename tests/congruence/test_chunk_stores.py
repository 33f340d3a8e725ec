"""Every store gives what the plain store gives, for every kind of vector."""

import zlib

import numpy as np
import pytest

from retrieval.chunking import Chunk
from retrieval.embeddings.embedders import LexicalEmbedder
from retrieval.embeddings.embedding import Embedding, SparseVector, VectorSpace
from retrieval.settings import LocalStoreConfig
from retrieval.stores import local_store, qdrant
from retrieval.stores.local_store import LocalChunkStore
from tests.retrieval.memory_server import MemoryServer
from tests.retrieval.plain_store import PlainChunkStore

SPACES = {
    "lexical": VectorSpace(None, sparse=True, idf=True),
    "dense": VectorSpace(8, sparse=False),
    "dense and sparse": VectorSpace(8, sparse=True),
    "sparse added to dense": VectorSpace(8, sparse=True, sparse_weight=0.3),
}


def random_embedding(space, rng):
    dense = sparse = None
    if space.dense_size:
        vector = rng.normal(size=space.dense_size).astype(np.float32)
        dense = vector / np.linalg.norm(vector)
    if space.sparse:
        terms = np.sort(rng.choice(12, size=rng.integers(dense is None, 6), replace=False))
        sparse = SparseVector(tuple(map(int, terms)), tuple(rng.uniform(0.1, 1, len(terms))))
    return Embedding(dense, sparse)


def chunks_of(document_id, num):
    return [
        Chunk(f"{document_id}:{i}", document_id, i, i + 1, "x", 1, first_token=i)
        for i in range(num)
    ]


@pytest.fixture(params=SPACES.values(), ids=SPACES.keys())
def space(request):
    return request.param


class ReopenedStore(LocalChunkStore):
    """A store with a folder, of which every document that is added is read back from its file."""

    @classmethod
    def open_in(cls, folder, space):
        return cls.open(LocalStoreConfig(folder=str(folder)), space, "index")

    async def add(self, tenant, document_id, *contents):
        stored = await super().add(tenant, document_id, *contents)
        await self.evict(tenant, document_id)
        async with self.claim(tenant, document_id) as found:
            assert found == stored
        return stored


@pytest.fixture
async def stores(space, tmp_path):
    stores = [
        PlainChunkStore(space),
        LocalChunkStore(space),
        MemoryServer().store(space),
        ReopenedStore.open_in(tmp_path, space),
    ]
    yield stores
    for store in stores:
        await store.close()


async def same_everywhere(stores, tenant, documents, query, **how):
    plain, *others = [await s.search(tenant, documents, query, **how) for s in stores]
    for found in others:
        np.testing.assert_allclose(
            [chunk.score for chunk in found], [chunk.score for chunk in plain], rtol=1e-5, atol=1e-6
        )
        for one, other in zip(found, plain, strict=True):
            assert (one.id, one.first_token) == (other.id, other.first_token)
            assert (one.cosine is None) == (other.cosine is None)
            assert one.cosine is None or one.cosine == pytest.approx(other.cosine, abs=1e-6)
    return others[0]


async def test_scores_order_floor_and_limit_agree(stores, space):
    rng = np.random.default_rng(0)
    for tenant, document_id, num in [("a", "x", 12), ("a", "y", 9), ("b", "x", 15), ("b", "z", 4)]:
        embeddings = [random_embedding(space, rng) for _ in range(num)]
        for store in stores:
            await store.add(tenant, document_id, chunks_of(document_id, num), embeddings, num)
    found = 0
    for _ in range(12):
        query = random_embedding(space, rng)
        for tenant, documents in [("a", ["x"]), ("a", ["x", "y"]), ("b", ["z", "x"]), ("c", ["x"])]:
            for floor, limit in [(-1.0, 50), (0.2, 50), (0.0, 3)]:
                chunks = await same_everywhere(
                    stores, tenant, documents, query, floor=floor, limit=limit
                )
                assert len(chunks) <= limit
                assert {chunk.document for chunk in chunks} <= set(documents)
                found += len(chunks)
    assert found > 100


async def test_what_was_stored_before_there_were_overlaps_is_found(stores, space, monkeypatch):
    one = random_embedding(VectorSpace(space.dense_size, sparse=False), np.random.default_rng(0))
    embedding = Embedding(one.dense, SparseVector((1,), (0.5,)) if space.sparse else None)
    monkeypatch.setattr(local_store, "_CHUNK_FIELDS", local_store._CHUNK_FIELDS[:-1])
    monkeypatch.setattr(qdrant, "_CONTENT", qdrant._CONTENT[:-1])
    for store in stores:
        await store.add("a", "x", chunks_of("x", 1), [embedding], 1)
    monkeypatch.undo()
    await same_everywhere(stores, "a", ["x"], embedding, floor=-1.0, limit=5)


LOG_LINES = [
    "ERROR disk full", "ERROR disk slow", "WARN disk slow", "INFO job done",
    "ERROR disk full on node seven", "INFO job started on node seven",
]  # fmt: skip


def log_of(space, rng, num):
    """Lines that repeat, so that most scores are shared by many chunks."""
    lines = [LOG_LINES[i] for i in rng.integers(0, len(LOG_LINES), num)]
    return embedded(space, lines)


def embedded(space, lines):
    """Embed lines so that equal lines have equal vectors."""
    if space.idf:
        return list(LexicalEmbedder().embed_passages(lines))
    embeddings = []
    for line in lines:
        words = line.split()
        terms = sorted({zlib.crc32(word.encode()) for word in words})
        dense = np.ones(space.dense_size, np.float32)
        for word in words:
            dense += np.random.default_rng(zlib.crc32(word.encode())).normal(size=space.dense_size)
        embeddings.append(
            Embedding(
                (dense / np.linalg.norm(dense)).astype(np.float32),
                SparseVector(tuple(terms), (0.5,) * len(terms)) if space.sparse else None,
            )
        )
    return embeddings


def query_of(space, text):
    return LexicalEmbedder().embed_query(text) if space.idf else embedded(space, [text])[0]


def open_local(space, folder):
    return LocalChunkStore(space)


def open_shared(space, folder):
    return MemoryServer().store(space)


def open_folder(space, folder):
    return ReopenedStore.open_in(folder, space)


@pytest.mark.parametrize(
    ("open_store", "limit"),
    [(open_local, 3), (open_local, 20), (open_local, 500), (open_shared, 20), (open_folder, 20)],
)
@pytest.mark.parametrize(
    "space",
    [
        SPACES["lexical"],
        VectorSpace(1024, sparse=False),
        VectorSpace(1024, sparse=True),
        VectorSpace(1024, sparse=True, sparse_weight=0.3),
    ],
    ids=SPACES.keys(),
)
async def test_what_else_a_store_held_never_moves_a_chunk(space, open_store, limit, tmp_path):
    """Many chunks score the same: which of them come, and in what order, must not be chance."""
    rng = np.random.default_rng(2)
    parts = {"x": log_of(space, rng, 90), "y": log_of(space, rng, 51)}
    plain = PlainChunkStore(space)
    idle, used = [open_store(space, tmp_path / name) for name in ("idle", "used")]
    for turn in range(6):  # point ids and places are freed and used again, in another order
        others = {"b": 40 + 7 * turn, "c": 30}
        for tenant, num in others.items():
            await used.add(tenant, "z", chunks_of("z", num), log_of(space, rng, num), num)
        await used.add("a", "x", chunks_of("x", 90), parts["x"], 90)
        await used.delete("b", "z")
        if turn < 5:
            await used.delete("a", "x")
    for store in (plain, idle, used):
        for document_id in ("y", "x"):
            embeddings = parts[document_id]
            num = len(embeddings)
            await store.add("a", document_id, chunks_of(document_id, num), embeddings, num)
    for text in [*LOG_LINES, "which disk is full", "node seven"]:
        query = query_of(space, text)
        for documents in (["x"], ["y", "x"], ["x", "y"]):
            chosen = [
                await store.search("a", documents, query, limit=limit, floor=0.0)
                for store in (plain, idle, used)
            ]
            by_plain, by_idle, by_used = [[chunk.id for chunk in chunks] for chunks in chosen]
            assert by_plain
            assert by_idle == by_plain
            assert by_used == by_plain
    await idle.close()
    await used.close()


async def test_many_documents_are_searched_as_one_by_one(space):
    """A vector store's search is about hundreds of documents, some of them empty."""
    rng = np.random.default_rng(5)
    plain, local = PlainChunkStore(space), LocalChunkStore(space)
    names = [f"d{number}" for number in range(60)]
    for name in names:
        num = int(rng.integers(0, 9))
        embeddings = [random_embedding(space, rng) for _ in range(num)]
        for store in (plain, local):
            await store.add("a", name, chunks_of(name, num), embeddings, num)
    for limit in (1, 7, 40):
        query = random_embedding(space, rng)
        rng.shuffle(names)
        assert await same_everywhere([plain, local], "a", names, query, limit=limit, floor=0.0)
    await local.close()


async def test_a_store_says_which_documents_it_has(stores, space):
    rng = np.random.default_rng(0)
    for store in stores:
        for document in "de":
            await store.add(
                "a", document, chunks_of(document, 1), [random_embedding(space, rng)], 1
            )
        await store.delete("a", "e")
        assert await store.find_stored("a", ["d", "e", "f"]) == {"d"}
        assert await store.find_stored("b", ["d"]) == set()


async def test_chunks_are_listed_in_pages(stores, space):
    rng = np.random.default_rng(0)
    chunks = chunks_of("d", 7)
    for store in stores:
        await store.add("a", "d", chunks, [random_embedding(space, rng) for _ in chunks], 7)
        pages = [await store.list_chunks("a", "d", first, 3) for first in (0, 3, 6, 7)]
        assert pages == [chunks[:3], chunks[3:6], chunks[6:], []]


async def test_deleted_documents_are_gone_and_may_return(stores, space):
    rng = np.random.default_rng(1)
    query = random_embedding(VectorSpace(8, True) if space.dense_size else space, rng)
    query = Embedding(
        query.dense, SparseVector((1, 2, 3), (1.0, 1.0, 1.0)) if space.sparse else None
    )
    how = {"floor": -1.0, "limit": 50}
    for num in (10, 6, 14):  # fewer and more than before: places are used again
        embeddings = [random_embedding(space, rng) for _ in range(num)]
        for store in stores:
            await store.add("a", "x", chunks_of("x", num), embeddings, num)
            await store.add("b", "x", chunks_of("x", num), embeddings, num)
            await store.delete("b", "x")
            await store.delete("b", "never added")
        assert await same_everywhere(stores, "a", ["x"], query, **how)
        for store in stores:
            await store.delete("a", "x")
            assert await store.search("a", ["x"], query, **how) == []


async def test_another_tenants_text_never_moves_a_score():
    """Term statistics could leak: `Belaron` must stay rare for the first tenant."""
    embedder = LexicalEmbedder()
    store = LocalChunkStore(embedder.space)
    texts = ["The harbor of Belaron is Tessin.", "The mayor of Orrin is Vael.", "It rains a lot."]

    async def add(tenant, document_id, texts):
        chunks = [Chunk(f"{document_id}:{i}", "n", i, i + 1, t, 8) for i, t in enumerate(texts)]
        await store.add(tenant, document_id, chunks, list(embedder.embed_passages(texts)), 9)

    async def ask(documents):
        query = embedder.embed_query("What is the harbor of Belaron?")
        return await store.search("first", documents, query, limit=9, floor=embedder.floor)

    await add("first", "d", texts)
    alone = await ask(["d"])
    await add("second", "d", ["Belaron harbor Belaron harbor"] * 40)
    await add("first", "other", ["The harbor of Belaron."] * 40)
    assert await ask(["d"]) == alone
    assert [chunk.text for chunk in alone] == texts[:1]
    await store.close()


async def test_a_text_goes_under_all_its_names(stores, space):
    rng = np.random.default_rng(0)
    for store in stores:
        for tenant, document_id in [("a", "t1-x"), ("a", "t1-y"), ("a", "t2-x"), ("b", "t1-x")]:
            embeddings = [random_embedding(space, rng) for _ in range(3)]
            async with store.claim(tenant, document_id):
                await store.add(tenant, document_id, chunks_of(document_id, 3), embeddings, 3)
        first, second = [await store.delete_text("a", "t1") for _ in range(2)]
        assert (first.num_found, second.num_found) == (2, 0)
        if "the operator's" in first.place:  # a server, whose files nobody looks through
            assert first.num_bytes == second.num_bytes == 0
        else:
            assert first.num_bytes > second.num_bytes > 0  # of what was there, and of what is left
        left = []
        for tenant, document_id in [("a", "t1-x"), ("a", "t1-y"), ("a", "t2-x"), ("b", "t1-x")]:
            async with store.claim(tenant, document_id) as found:
                left.append(found is not None)
        assert left == [False, False, True, True]
