"""After a file is deleted, its words are in no process and no file of a running server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from rapid.chat_messages import Document
from rapid.checkpoints.text import ChatText
from rapid.documents import name_text
from rapid.embedded.generator import generate_document
from tests.ports import free_port
from tests.process_memory import FILLS_FREED, find_in_files, find_in_processes
from tests.ray_cluster import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RAPID = Path(sys.executable).parent / "rapid"
NAME = "Zyxquavorim"
SECRET = f"The cellar of {NAME} keeps eleven copper lanterns under a walnut stair."
OTHER = "The meadow of Thornwick sells some eleven silver buttons over a maple bridge, and more."
# Its words are those of many passages, so that prompts are long.
QUESTION = "Nobody asked about eleven barrels: which entry is the first, second and third deposit?"
MOST_ROUNDS = 6  # of other requests, after which nothing that is reused has the secret


def text_of(number: int, size: int, line: str) -> str:
    return f"{generate_document(number, size).text}\n\n{line}\n"


class Server:
    """`rapid serve` as it is typed, with every tier of KV, and passages in files."""

    def __init__(self, folder: Path, ray_folder: Path) -> None:
        self.folder, self.ray_folder = folder, ray_folder
        file = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
        file["http_options"]["port"] = port = free_port()
        args = file["applications"][0]["args"]
        args["retriever"]["retrieval"]["store"]["folder"] = "chunks"
        args["orchestrator"]["draft_length"] = "fixed"
        for pool in ("target", "drafter"):
            tiers = {"host_cache_tokens": 16384, "disk_cache_folder": "kv", "disk_cache_gib": 0.5}
            args[pool]["engine"] |= tiers
            args[pool]["pool"]["max_replicas"] = 1  # so that all are seen
        (folder / "config.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._environment = own | FILLS_FREED | {"RAY_TMPDIR": str(ray_folder)}
        self._process = subprocess.Popen(
            [RAPID, "serve", "config.yaml"],
            cwd=folder,
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        told = []
        for line in iter(self._process.stderr.readline, ""):
            told.append(line)
            if line.startswith("Ctrl-C here"):
                break
        assert self._process.poll() is None, told
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def end(self) -> None:
        self.http.close()
        self._process.send_signal(signal.SIGINT)
        self._process.communicate()

    def call(self, method: str, path: str, **options: Any) -> Any:
        reply = self.http.request(method, path, **options)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def use(self, number: int, size: int, line: str) -> str:
        """Upload a document with a line, ask about it in every way, and return the file's id."""
        text = text_of(number, size, line).encode()
        form = {"purpose": (None, "user_data"), "file": ("notes.txt", text)}
        file_id: str = self.call("POST", "/v1/files", files=form)["id"]
        store = f"/v1/vector_stores/{self.call('POST', '/v1/vector_stores', json={})['id']}"
        self.call("POST", f"{store}/files", json={"file_id": file_id})
        wait_until(lambda: self.call("GET", store)["status"] == "completed", 60, 0.2)
        for _ in range(8):
            self.call("POST", f"{store}/search", json={"query": QUESTION})
        asked: dict[str, Any] = {"model": "rapid-embedded", "temperature": 0}
        for mode in ("plain", "lossless", "fused", "rag"):
            messages = [{"role": "user", "content": QUESTION}]
            rapid = {"file_ids": [file_id], "mode": mode, "citations": True}
            body = asked | {"messages": messages, "max_tokens": 20, "rapid": rapid}
            answer = self.call("POST", "/v1/chat/completions", json=body)
            # Shorter arrays are kept by numpy when they are freed.
            assert answer["usage"]["prompt_tokens"] > 256
        tools = [{"type": "file_search", "vector_store_ids": [store.rpartition("/")[2]]}]
        body = asked | {"input": QUESTION, "tools": tools, "max_output_tokens": 20}
        body |= {"include": ["file_search_call.results"]}
        assert self.call("POST", "/v1/responses", json=body)["output"][0]["results"]
        with self.http.stream("POST", "/v1/responses", json=body | {"stream": True}) as reply:
            assert "file_search_call.completed" in "".join(reply.iter_text())
        return file_id

    def delete(self, file_id: str) -> None:
        def is_gone() -> bool:
            state: str = self.call("DELETE", f"/v1/files/{file_id}")["rapid"]["state"]
            return state == "gone"

        wait_until(is_gone, 60, 0.2)

    def find(self, wanted: dict[str, bytes]) -> dict[str, set[str]]:
        return find_in_processes(self._process.pid, wanted)

    def verify(self, *options: str) -> tuple[int, list[str]]:
        """The exit status of `rapid documents verify`, and what it has found."""
        command = [RAPID, "documents", "verify", "config.yaml", *options]
        ended = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True
        )
        return ended.returncode, ended.stdout.splitlines()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tmp_path = tmp_path_factory.mktemp("server")
    ray_folder = Path(tempfile.mkdtemp(prefix="rapid-", dir="/tmp"))  # short, as its sockets' paths
    server = Server(tmp_path, ray_folder)
    try:
        yield server
    finally:
        server.end()
        shutil.rmtree(ray_folder, ignore_errors=True)


def test_no_process_and_no_file_has_a_word_of_what_is_deleted(server: Server) -> None:
    ids = ChatText.load("embedded:target").encode(f" {SECRET}")[4:20]
    wanted = {"word": NAME.encode()}
    wanted |= {str(kind): np.array(ids, kind).tobytes() for kind in ("int32", "int64")}
    file_id = server.use(7, 600, SECRET)
    for number in (1, 2):  # and now what has only passed through a buffer is overwritten
        server.use(number, 800, OTHER)
    before = server.find(wanted)
    for pool in ("Retriever", "Orchestrator", "Ingress"):
        assert "word" in before.get(f"ray::ServeReplica:rapid:{pool}", ()), before
    kept = {Path(each).parent.name: each for each in find_in_files(server.folder, wanted)}
    assert {"originals", "texts", "library"} < kept.keys()  # and the folder of passages
    server.delete(file_id)
    found = server.find(wanted)
    for number in range(MOST_ROUNDS):
        if not found:
            break
        server.use(3 + number, 800, OTHER)
        found = server.find(wanted)
    # It relays bytes, and a buffer of its connections may have what it received until it is used
    # again, as docs/security.md says.
    assert not found.keys() - {"ray::ProxyActor"}, found
    assert find_in_files(server.folder, wanted) == set()
    assert find_in_files(server.ray_folder, wanted) == set()


def test_what_a_backup_brings_back_is_found_and_forgotten_again(
    server: Server, tmp_path: Path
) -> None:
    file_id = server.use(9, 600, SECRET)
    name = name_text("local", Document("notes.txt", text_of(9, 600, SECRET)).digest)
    kept = [server.folder / "chunks", server.folder / "kv"]
    wait_until(lambda: bool([*kept[1].rglob(f"{name}.doc")]), 60)
    for each in kept:
        shutil.copytree(each, tmp_path / each.name, ignore=shutil.ignore_patterns("lock", "*.part"))
    server.delete(file_id)
    assert server.verify() == (0, [])
    for each in kept:
        shutil.copytree(tmp_path / each.name, each, dirs_exist_ok=True)
    orphans = [f"KV of a deleted text: {name}", f"passages of a deleted text: {name}"]
    assert server.verify() == (1, orphans)
    assert server.verify("--repair") == (0, orphans)
    wait_until(lambda: server.verify() == (0, []), 60)
    assert not [*kept[1].rglob(f"{name}.doc")]
    assert find_in_files(kept[0], {"word": NAME.encode()}) == set()
