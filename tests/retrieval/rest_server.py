"""Qdrant's REST interface, as much of it as retrievers use, before Qdrant's own local mode.

It is no Qdrant: it has no disk, no replicas, and its speed says nothing. It can be stopped, started
again at the same address, and emptied, from the process that made it.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import BaseModel
from qdrant_client import QdrantClient
from qdrant_client import models as qm

_DONE = {"operation_id": 1, "status": "completed"}


class RestQdrant:
    """A server with an empty Qdrant, on loopback unless another address of this machine is given.

    Attributes:
        url: Where it listens while it is started.
        calls: How many requests it had, by method and end of path.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._client = QdrantClient(":memory:")
        self._host, self._port = host, 0
        self.start()
        self.url = f"http://{host}:{self._port}"

    def start(self) -> None:
        """Listen, at the address of before."""
        rest = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, said = rest._answer(
                    self.command, self.path.partition("?")[0], json.loads(body or "{}")
                )
                content = json.dumps(said, default=_plain).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                self.close_connection = rest._is_stopping

            do_GET = do_PUT = do_POST = answer

            def log_message(self, *args: object) -> None:
                pass

        self._is_stopping = False
        self._server = ThreadingHTTPServer((self._host, self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections, and keep what was stored."""
        self._is_stopping = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def empty(self) -> None:
        """Lose everything."""
        with self._lock:
            self._client = QdrantClient(":memory:")

    def num_chunks(self, collection: str) -> int:
        """Return how many chunks of documents are stored."""
        with self._lock:
            records, _ = self._client.scroll(collection, limit=100_000, with_payload=True)
        return sum("chunk_id" in (record.payload or {}) for record in records)

    def _answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/":
            return 200, {"title": "qdrant", "version": "1.19.2"}
        _, collection, *rest = path.strip("/").split("/")
        what = " ".join([method, *rest])
        with self._lock:
            self.calls[what] += 1
            if self._is_stopping:
                return 503, {"status": {"error": "stopping"}}
            try:
                result = self._do(what, collection, body)
            except ValueError as error:
                status = 404 if "not found" in str(error) else 400
                return status, {"status": {"error": str(error)}}
        return 200, {"result": result, "status": "ok", "time": 0}

    def _do(self, what: str, collection: str, body: dict[str, Any]) -> Any:
        client = self._client
        match what:
            case "GET exists":
                return {"exists": client.collection_exists(collection)}
            case "PUT":
                made = qm.CreateCollection.model_validate(body)
                return client.create_collection(
                    collection,
                    vectors_config=made.vectors,
                    sparse_vectors_config=made.sparse_vectors,
                )
            case "GET":
                return client.get_collection(collection)
            case "PUT points":
                put = qm.PointsList.model_validate(body)
                client.upsert(collection, put.points, update_filter=put.update_filter)
            case "POST points":
                get = qm.PointRequest.model_validate(body)
                return client.retrieve(collection, get.ids, with_payload=True)
            case "POST points payload":
                told = qm.SetPayload.model_validate(body)
                client.set_payload(collection, told.payload, qm.FilterSelector(filter=told.filter))
            case "POST points delete":
                client.delete(collection, qm.FilterSelector.model_validate(body))
            case "POST points count":
                count = qm.CountRequest.model_validate(body)
                return client.count(collection, count.filter, exact=True)
            case "POST points scroll":
                scroll = qm.ScrollRequest.model_validate(body)
                points, _ = client.scroll(
                    collection, scroll.filter, limit=scroll.limit, with_payload=True
                )
                return {"points": points}
            case "POST points query batch":
                searches = qm.QueryRequestBatch.model_validate(body).searches
                for each in searches:
                    each.params.exact = None  # local mode is always exact, and warns
                return client.query_batch_points(collection, searches)
            case "PUT index":
                pass
            case _:
                raise ValueError(f"no such call: {what}")
        return _DONE


def _plain(value: object) -> Any:
    assert isinstance(value, BaseModel)
    return value.model_dump(mode="json", exclude_none=True)
