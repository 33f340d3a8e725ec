"""What only a server can do wrong, told to a small HTTP server that plays one."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from retrieval.chunking import Chunk
from retrieval.config import LocalStoreConfig, ServerStoreConfig
from retrieval.embedding import Embedding, SparseVector, VectorSpace
from retrieval.errors import CollectionMismatch, StoreUnavailable
from retrieval.qdrant import QdrantChunkStore

HYBRID = VectorSpace(4, sparse=True)
LEXICAL = VectorSpace(None, sparse=True, idf=True)
DENSE = np.array([1, 0, 0, 0], dtype=np.float32)
TERMS = SparseVector((1, 7), (0.5, 0.25))
COLLECTION = {
    "status": "green",
    "optimizer_status": "ok",
    "segments_count": 1,
    "payload_schema": {},
    "config": {
        "params": {
            "vectors": {"dense": {"size": 4, "distance": "Cosine"}},
            "sparse_vectors": {"sparse": {}},
        },
        "hnsw_config": {"m": 16, "ef_construct": 100, "full_scan_threshold": 10000},
        "optimizer_config": {
            "deleted_threshold": 0.2,
            "vacuum_min_vector_number": 1000,
            "default_segment_number": 0,
            "flush_interval_sec": 5,
        },
    },
}


class FakeQdrant:
    """Answers from a table and writes down what it was asked."""

    def __init__(self):
        done = {"operation_id": 1, "status": "completed"}
        self.status = 200
        self.requests = []
        self.answers = {
            "GET /": {"title": "qdrant", "version": "1.19.2"},
            "GET /collections/chunks/exists": {"result": {"exists": True}},
            "GET /collections/chunks": {"result": COLLECTION},
            "PUT /collections/chunks": {"result": True},
            "PUT /collections/chunks/index": {"result": done},
            "PUT /collections/chunks/points": {"result": done},
            "POST /collections/chunks/points/delete": {"result": done},
            "POST /collections/chunks/points/query": {"result": {"points": []}},
        }
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                name = f"{self.command} {self.path.partition('?')[0]}"
                key = self.headers.get("api-key")
                fake.requests.append((name, json.loads(body or "null"), key))
                content = json.dumps({"time": 0, "status": "ok"} | fake.answers[name]).encode()
                self.send_response(fake.status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = answer

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def bodies(self, name):
        return [body for asked, body, _ in self.requests if asked == name]

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server():
    server = FakeQdrant()
    yield server
    server.close()


async def open_store(server, space=HYBRID, **config):
    config = ServerStoreConfig(kind="server", url=server.url, **config)
    return await QdrantChunkStore.open(config, "chunks", space)


def chunk(index=0):
    return Chunk(f"d:{index}", "name", index, index + 1, "x", 1)


def levels(query):
    """A query and every prefetch in it, however deep."""
    yield query
    for prefetch in query.get("prefetch") or []:
        yield from levels(prefetch)


async def test_the_tenant_is_in_every_prefetch_and_indexed_as_one(server):
    store = await open_store(server, api_key="secret")
    await store.search("acme", ["d"], Embedding(DENSE, TERMS), limit=5, floor=0.3)
    (query,) = server.bodies("POST /collections/chunks/points/query")
    found = list(levels(query))
    assert len(found) == 4  # the fusion, dense, sparse, and the dense floor below sparse
    for level in found:
        conditions = {c["key"]: c["match"] for c in level["filter"]["must"]}
        assert conditions["tenant"] == {"value": "acme"}
        assert [scope.rpartition("/")[2] for scope in conditions["document_id"]["any"]] == ["d"]
    assert query["query"] == {"rrf": {"k": 60}}
    by_meaning, by_words = query["prefetch"]
    assert by_meaning["score_threshold"] == 0.3
    assert by_words["prefetch"] == [by_meaning]
    indexes = server.bodies("PUT /collections/chunks/index")
    assert {"type": "keyword", "is_tenant": True} in [index["field_schema"] for index in indexes]
    assert {key for _, _, key in server.requests} == {"secret"}
    await store.close()


async def test_term_statistics_are_the_tenants_own(server):
    server.answers["GET /collections/chunks/exists"] = {"result": {"exists": False}}
    params = {"vectors": {}, "sparse_vectors": {"sparse": {"modifier": "idf"}}}
    config = COLLECTION["config"] | {"params": params}
    server.answers["GET /collections/chunks"] = {"result": COLLECTION | {"config": config}}
    store = await open_store(server, LEXICAL)
    (created,) = server.bodies("PUT /collections/chunks")
    assert created["sparse_vectors"] == {"sparse": {"modifier": "idf"}}
    await store.search("acme", ["d"], Embedding(None, TERMS), limit=5, floor=0.0)
    (query,) = server.bodies("POST /collections/chunks/points/query")
    assert query["params"]["idf"] == {"corpus": query["filter"]}
    assert query["params"]["exact"] is True
    await store.close()


async def test_a_store_takes_with_it_what_it_added(server):
    store = await open_store(server)
    await store.add("acme", "d", [chunk(0), chunk(1)], [Embedding(DENSE, TERMS)] * 2)
    await store.close()
    (added,) = server.bodies("PUT /collections/chunks/points")
    (deleted,) = server.bodies("POST /collections/chunks/points/delete")
    assert deleted["points"] == [point["id"] for point in added["points"]]


async def test_no_server_is_a_sentence_that_names_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        config = ServerStoreConfig(kind="server", url=url)
        with pytest.raises(StoreUnavailable, match=f"{url} does not answer.*store.url"):
            await QdrantChunkStore.open(config, "chunks", HYBRID)


@pytest.mark.parametrize(("status", "advice"), [(401, "wants an API key"), (403, "refuses")])
async def test_a_wrong_key_is_told_as_one(server, status, advice):
    server.status = status
    with pytest.raises(StoreUnavailable, match=advice):
        await open_store(server)


async def test_a_server_that_mixes_tenants_statistics_is_refused(server):
    server.answers["GET /"]["version"] = "1.18.4"
    with pytest.raises(CollectionMismatch, match=r"1\.18\.4 .* Upgrade"):
        await open_store(server)


async def test_a_collection_for_another_embedder_is_refused(server):
    with pytest.raises(CollectionMismatch, match=r"dense vectors of 4 .* another collection"):
        await open_store(server, VectorSpace(1024, sparse=True))


async def test_vectors_of_another_size_are_refused():
    store = await QdrantChunkStore.open(LocalStoreConfig(), "chunks", HYBRID)
    with pytest.raises(CollectionMismatch, match="dense vectors of 2"):
        await store.add("acme", "d", [chunk()], [Embedding(DENSE[:2], TERMS)])
    await store.close()


async def test_many_documents_in_turn_take_the_room_of_one():
    """Local mode keeps deleted points for ever; their places are used again."""
    store = await QdrantChunkStore.open(LocalStoreConfig(), "chunks", HYBRID)
    for turn in range(20):
        chunks = [chunk(index) for index in range(5)]
        await store.add("acme", f"d{turn}", chunks, [Embedding(DENSE, TERMS)] * 5)
        await store.delete("acme", f"d{turn}")
    assert len(store._client._client.collections["chunks"].ids) == 5
    await store.close()
