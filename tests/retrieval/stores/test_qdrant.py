"""What only a server can do wrong, told to a small HTTP server that plays one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from retrieval.chunking import Chunk
from retrieval.embeddings.embedding import Embedding, SparseVector, VectorSpace
from retrieval.retrieval_errors import CollectionMismatch, StoreUnavailable
from retrieval.settings import ServerStoreConfig
from retrieval.stores.shared_store import SharedChunkStore
from tests.ports import free_port

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
        self.on = {}  # answers that change
        self.answers = {
            "GET /": {"title": "qdrant", "version": "1.19.2"},
            "GET /collections/chunks/exists": {"result": {"exists": True}},
            "GET /collections/chunks": {"result": COLLECTION},
            "PUT /collections/chunks": {"result": True},
            "PUT /collections/chunks/index": {"result": done},
            "PUT /collections/chunks/points": {"result": done},
            "POST /collections/chunks/points/count": {"result": {"count": 0}},
            "POST /collections/chunks/points/delete": {"result": done},
            "POST /collections/chunks/points/payload": {"result": done},
            "POST /collections/chunks/points/query/batch": {"result": []},
            "POST /collections/chunks/points/scroll": {"result": {"points": []}},
        }
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                name = f"{self.command} {self.path.partition('?')[0]}"
                key = self.headers.get("api-key")
                fake.requests.append((name, json.loads(body or "null"), key))
                said = fake.on[name]() if name in fake.on else fake.answers[name]
                content = json.dumps({"time": 0, "status": "ok"} | said).encode()
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
    return await SharedChunkStore.open(config, "chunks", space, "index")


def chunk(index=0):
    return Chunk(f"d:{index}", "name", index, index + 1, "x", 1)


def conditions(scope):
    """What each field of a filter must match."""
    return {each["key"]: each["match"] for each in scope["must"] if "key" in each}


async def added(server, store, tenant, num):
    """Add a document of `num` chunks and return its points as the server got them."""
    chunks = [chunk(i) for i in range(num)]
    await store.add(tenant, "d", chunks, [Embedding(DENSE, TERMS)] * num, num)
    server.answers["POST /collections/chunks/points/count"] = {"result": {"count": num}}
    of_chunks, _manifest = server.bodies("PUT /collections/chunks/points")[-2:]
    return of_chunks["points"]


def answer(server, points, *rankings):
    """Let the server answer with scores of the points, one mapping of index to score a query."""
    found = [
        [{"id": points[i]["id"], "version": 0, "score": score} for i, score in ranking.items()]
        for ranking in rankings
    ]
    server.answers["POST /collections/chunks/points/query/batch"] = {
        "result": [{"points": each} for each in found]
    }
    records = [{"id": point["id"], "payload": point["payload"]} for point in points]
    server.answers["POST /collections/chunks/points/scroll"] = {"result": {"points": records}}


async def test_the_tenant_is_in_every_call_and_indexed_as_one(server):
    store = await open_store(server, api_key="secret")
    points = await added(server, store, "acme", 2)
    answer(server, points, {0: 0.9, 1: 0.8}, {1: 2.0})
    await store.search("acme", ["d"], Embedding(DENSE, TERMS), limit=5, floor=0.3)
    (batch,) = server.bodies("POST /collections/chunks/points/query/batch")
    (look_up,) = server.bodies("POST /collections/chunks/points/scroll")
    by_meaning, by_words = batch["searches"]
    (count,) = server.bodies("POST /collections/chunks/points/count")
    look_up_scope = next(each for each in look_up["filter"]["must"] if "must" in each)
    for scope in (by_meaning["filter"], by_words["filter"], look_up_scope, count["filter"]):
        matches = conditions(scope)
        assert matches["tenant"] == {"value": "acme"}
        assert [each.rpartition("/")[2] for each in matches["document_id"]["any"]] == ["d"]
    assert by_meaning["score_threshold"] == 0.3
    indexes = server.bodies("PUT /collections/chunks/index")
    assert {"type": "keyword", "is_tenant": True} in [index["field_schema"] for index in indexes]
    assert {key for _, _, key in server.requests} == {"secret"}
    await store.close()


async def test_a_new_collection_has_no_graph_as_searches_are_exact(server):
    server.answers["GET /collections/chunks/exists"] = {"result": {"exists": False}}
    store = await open_store(server)
    (made,) = server.bodies("PUT /collections/chunks")
    assert made["hnsw_config"] == {"m": 0}
    await store.close()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
async def test_the_order_among_equal_scores_is_not_the_servers(server, order):
    """Neither in the answer, nor where it is cut, nor in the ranks that are fused."""
    store = await open_store(server)
    points = await added(server, store, "acme", 4)
    equal = {i: 0.5 for i in order}
    answer(server, points, equal, dict(sorted(equal.items(), key=lambda item: -item[0])))
    for query in (Embedding(DENSE, TERMS), Embedding(DENSE, None)):
        found = await store.search("acme", ["d"], query, limit=2, floor=0.3)
        assert [each.id for each in found] == ["d:0", "d:1"]
    await store.close()


async def test_scores_that_differ_by_rounding_are_equal(server):
    store = await open_store(server)
    points = await added(server, store, "acme", 3)
    answer(server, points, {2: 0.50000012, 1: 0.50000006, 0: 0.5})
    found = await store.search("acme", ["d"], Embedding(DENSE, None), limit=2, floor=0.3)
    assert [each.id for each in found] == ["d:0", "d:1"]
    assert found[0].score == found[1].score
    await store.close()


async def test_a_chunk_that_a_word_alone_would_find_is_not_evidence(server):
    store = await open_store(server)
    points = await added(server, store, "acme", 3)
    answer(server, points, {1: 0.9}, {0: 7.0, 1: 2.0})
    found = await store.search("acme", ["d"], Embedding(DENSE, TERMS), limit=5, floor=0.3)
    assert [(each.id, each.score) for each in found] == [("d:1", pytest.approx(2 / 60))]
    await store.close()


async def test_term_statistics_are_the_tenants_own(server):
    server.answers["GET /collections/chunks/exists"] = {"result": {"exists": False}}
    params = {"vectors": {}, "sparse_vectors": {"sparse": {"modifier": "idf"}}}
    config = COLLECTION["config"] | {"params": params}
    server.answers["GET /collections/chunks"] = {"result": COLLECTION | {"config": config}}
    store = await open_store(server, LEXICAL)
    (created,) = server.bodies("PUT /collections/chunks")
    assert created["sparse_vectors"] == {"sparse": {"modifier": "idf"}}
    await store.add("acme", "d", [chunk()], [Embedding(None, TERMS)], 1)
    server.answers["POST /collections/chunks/points/count"] = {"result": {"count": 1}}
    answer(server, [], {})
    await store.search("acme", ["d"], Embedding(None, TERMS), limit=5, floor=0.0)
    (batch,) = server.bodies("POST /collections/chunks/points/query/batch")
    (query,) = batch["searches"]
    assert query["params"]["idf"] == {"corpus": query["filter"]}
    assert query["params"]["exact"] is True
    await store.close()


async def test_a_claim_is_a_conditional_write_that_is_read_back(server):
    store = await open_store(server)
    server.answers["POST /collections/chunks/points"] = {"result": []}
    claiming = store.claim("acme", "d")
    mine = {"id": "x", "payload": {"state": "claimed", "owner": store._manifests._owner}}
    reads = iter([[], [mine]])
    server.on["POST /collections/chunks/points"] = lambda: {"result": next(reads)}
    assert await claiming.__aenter__() is None
    (claim,) = server.bodies("PUT /collections/chunks/points")
    free, expired = claim["update_filter"]["should"]
    assert [each["key"] for each in free["must"]] == ["state", "claimed_until"]
    assert expired["key"] == "expires_at"
    (manifest,) = claim["points"]
    assert manifest["vector"] == {}
    assert manifest["payload"]["tenant"] == "acme"
    assert "document_id" not in manifest["payload"]  # by which searches choose
    await claiming.__aexit__(None, None, None)
    await store.close()


async def test_no_server_is_a_sentence_that_names_it_and_refuses_at_once():
    url = f"http://127.0.0.1:{free_port()}"
    config = ServerStoreConfig(kind="server", url=url)
    store = await SharedChunkStore.open(config, "chunks", HYBRID, "index")
    assert f"{url} does not answer" in store.outage
    assert "store.url" in store.outage
    with pytest.raises(StoreUnavailable, match="does not answer"):
        async with store.claim("acme", "d"):
            pass
    await store.close()


@pytest.mark.parametrize(("status", "advice"), [(401, "wants an API key"), (403, "refuses")])
async def test_a_wrong_key_is_told_as_one(server, status, advice):
    server.status = status
    store = await open_store(server)
    assert advice in store.outage
    await store.close()


async def test_a_server_that_mixes_tenants_statistics_is_refused(server):
    server.answers["GET /"]["version"] = "1.18.4"
    with pytest.raises(CollectionMismatch, match=r"1\.18\.4 .* Upgrade"):
        await open_store(server)


async def test_a_collection_for_another_embedder_is_refused(server):
    with pytest.raises(CollectionMismatch, match=r"dense vectors of 4 .* another collection"):
        await open_store(server, VectorSpace(1024, sparse=True))
