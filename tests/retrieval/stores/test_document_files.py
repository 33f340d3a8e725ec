"""Documents that outlive the process that embedded them, and what is left of those that do not."""

import asyncio
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from rapid.documents import name_text
from rapid.engine_status import Erasure
from rapid.errors import UnknownDocument
from retrieval import Document, LexicalEmbedder, RetrievalConfig, StoreUnavailable, open_retriever
from retrieval.embeddings.embedding import VectorSpace
from retrieval.settings import LocalStoreConfig
from retrieval.stores.document_files import DocumentFiles
from retrieval.stores.local_store import LocalChunkStore
from tests.retrieval.filed_documents import add, document, open_store
from tests.retrieval.test_retriever import LETTER, QUESTION, SMALL, Watched
from tests.retrieval.tokens import words

DAY_S = 86_400.0


async def is_whole(store, number):
    """Whether a document is found as it was added; False if it is not there."""
    chunks, embeddings, _ = document(number)
    async with store.claim("us", f"d{number}") as found:
        if found is None:
            return False
    query = embeddings[0]
    best = await store.search("us", [f"d{number}"], query, limit=number, floor=-1e9)
    assert {each.id: (each.text, each.cosine) for each in best} == {
        chunk.id: (chunk.text, pytest.approx(float(each.dense @ query.dense), abs=1e-5))
        for chunk, each in zip(chunks, embeddings, strict=True)
    }
    return True


def files_with(folder, content):
    return [
        path.name for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()
    ]


async def test_a_restart_finds_every_document_and_embeds_none(tmp_path):
    config = SMALL.model_copy(update={"store": LocalStoreConfig(folder=str(tmp_path))})
    before, after = Watched(), Watched()
    first = await open_retriever(config, words, before, tokenizer="words")
    found = await first.retrieve("us", [LETTER], QUESTION)
    await first.close()
    second = await open_retriever(config, words, after, tokenizer="words")
    with pytest.raises(UnknownDocument):
        await second.retrieve("them", [LETTER.ref], QUESTION)
    for letter in (LETTER.ref, LETTER):  # its text is not needed
        again = await second.retrieve("us", [letter], QUESTION)
        assert (again.chunks, again.document_ids) == (found.chunks, found.document_ids)
    assert (before.passages > 0, after.passages) == (True, 0)
    await second.index("them", [LETTER])
    assert after.passages == before.passages
    await second.close()


async def test_what_is_forgotten_leaves_no_byte_also_after_a_restart(tmp_path):
    config = SMALL.model_copy(update={"store": LocalStoreConfig(folder=str(tmp_path))})
    first = await open_retriever(config, words, tokenizer="words")
    note = Document("note", "The harbor of Belaron is Zyxwvut.")
    ids = await first.index("us", [note, LETTER])
    await first.index("them", [note])
    assert len(files_with(tmp_path, b"Zyxwvut")) == 2
    await first.forget("us", ids[0])
    assert len(files_with(tmp_path, b"Zyxwvut")) == 1
    await first.close()
    second = await open_retriever(config, words, tokenizer="words")
    num_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*.npz"))
    name = name_text("us", LETTER.digest)
    erasure = await second.forget_text("us", name)  # it has not been asked about since
    assert erasure == Erasure("passages", num_bytes, 1)
    assert files_with(tmp_path, b"Tessin") == []
    assert (await second.retrieve("them", [note], QUESTION)).chunks
    await second.close()


async def test_room_for_others_is_made_in_memory_and_the_file_stays(tmp_path):
    embedder = Watched()
    config = RetrievalConfig(
        chunk_tokens=16, max_cached_chunks=1, store={"kind": "local", "folder": str(tmp_path)}
    )
    retriever = await open_retriever(config, words, embedder, tokenizer="words")
    documents = [Document(name, f"The harbor of {name}.") for name in "abc"]
    for each in documents:
        await retriever.index("us", [each])
    assert retriever._store.num_chunks == 1
    assert len((await retriever.retrieve("us", documents, "harbor")).chunks) == 3
    assert embedder.passages == 3
    await retriever.close()


CHILD = """
import asyncio, itertools, os, pathlib, sys
from tests.retrieval.filed_documents import add, open_store
async def run(numbers):
    store = open_store(sys.argv[1])
    for number in numbers:
        await add(store, number)
        print(number, flush=True)
"""

DIES_AT_THE_SECOND = """
def numbers():
    yield 3
    pathlib.Path.replace = lambda *_: os.kill(os.getpid(), 9)
    yield 5
asyncio.run(run(numbers()))
"""


def start(code, folder):
    command = [sys.executable, "-c", CHILD + code, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_after_a_kill_what_was_added_is_whole_and_the_rest_is_to_be_added(tmp_path):
    with start("asyncio.run(run(itertools.count(1)))", tmp_path) as child:
        told = [int(child.stdout.readline()) for _ in range(30)]
        refusal = r"another process keeps .* stop it, or .* store\.folder"
        with pytest.raises(StoreUnavailable, match=refusal):
            open_store(tmp_path)
        child.send_signal(signal.SIGKILL)
        told += map(int, child.stdout.read().split("\n")[:-1])
    store = open_store(tmp_path)
    assert all([await is_whole(store, number) for number in told])
    assert not await is_whole(store, told[-1] + 2)
    for number in (told[-1] + 1, told[-1] + 2):
        if not await is_whole(store, number):
            await add(store, number)
        assert await is_whole(store, number)
    await store.close()


async def test_a_document_that_was_being_written_is_not_there(tmp_path):
    with start(DIES_AT_THE_SECOND, tmp_path) as child:
        assert child.stdout.read() == "3\n"
    assert len(list(tmp_path.rglob("*.part"))) == 1
    store = open_store(tmp_path)
    assert list(tmp_path.rglob("*.part")) == []
    assert [await is_whole(store, number) for number in (3, 5)] == [True, False]
    await store.close()


@pytest.mark.parametrize("broken", [b"", b"PK", None])
async def test_a_broken_file_is_removed_and_its_document_added_again(tmp_path, broken, caplog):
    store = open_store(tmp_path)
    await add(store, 50)
    await store.evict("us", "d50")
    (path,) = tmp_path.rglob("*.npz")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if broken is None else broken)
    assert not await is_whole(store, 50)
    assert "embedded anew" in caplog.text
    await add(store, 50)
    assert await is_whole(store, 50)
    await store.close()


async def test_what_other_settings_or_vectors_made_is_never_read_but_deleted_too(tmp_path):
    for index in ("one", "another"):
        store = open_store(tmp_path, index)
        assert not await is_whole(store, 3)
        await add(store, 3)
        await store.close()
    wide = LocalChunkStore.open(LocalStoreConfig(folder=str(tmp_path)), VectorSpace(8, True), "one")
    async with wide.claim("us", "d3") as found:
        assert found is None
    assert len(files_with(tmp_path, b"secret d3:1")) == 2
    await wide.delete("us", "d3")
    assert files_with(tmp_path, b"secret d3:1") == []
    await wide.close()


async def test_a_folder_belongs_to_its_owner(tmp_path):
    store = open_store(tmp_path / "new")
    await add(store, 3)
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "new").rglob("d*.npz")}
    modes |= {path.stat().st_mode & 0o077 for path in (tmp_path / "new", *tmp_path.glob("*/*/"))}
    assert modes == {0}
    await store.close()


def test_what_nobody_has_used_for_the_time_to_live_is_removed(tmp_path):
    now = 1e9
    arrays = {"about": np.zeros(3, np.uint8)}
    files = DocumentFiles(tmp_path, "index", DAY_S, lambda: now)
    for name in ("used", "unused"):
        files.write(("us", name), arrays)
    for _ in range(3):
        now += 0.6 * DAY_S
        files.use([("us", "used")])
    files.write(("us", "new"), arrays)
    assert files.read(("us", "unused")) is None
    assert files.read(("us", "used"))
    files.close()
    now += 1.1 * DAY_S
    files = DocumentFiles(tmp_path, "other", DAY_S, lambda: now)
    assert list(tmp_path.rglob("*.npz")) == []
    files.close()


async def test_a_folder_that_cannot_be_written_is_told_with_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match=r"file .*another store\.folder"):
        open_store(tmp_path / "file")
    store = open_store(tmp_path)

    def fill(file, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", fill)
        with pytest.raises(StoreUnavailable, match=r"No space left .* make room there"):
            await add(store, 3)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file", "lock"]
    assert not await is_whole(store, 3)
    await add(store, 3)
    assert await is_whole(store, 3)
    await store.close()


async def test_a_search_waits_for_no_file_and_what_is_deleted_stays_deleted(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    await add(store, 3)
    has_begun, go_on, save = threading.Event(), threading.Event(), np.savez

    def wait_and_save(*args, **arrays):
        has_begun.set()
        assert go_on.wait(10)
        save(*args, **arrays)

    monkeypatch.setattr(np, "savez", wait_and_save)
    adding = asyncio.create_task(add(store, 5))
    await asyncio.to_thread(has_begun.wait, 10)
    assert await is_whole(store, 3)  # though another's document is being written
    adding.cancel()
    deleting = asyncio.create_task(store.delete("us", "d5"))
    await asyncio.sleep(0)
    go_on.set()
    await deleting
    assert files_with(tmp_path, b"secret d5:0") == []
    await store.close()


async def test_a_folder_wants_to_know_the_tokenizer(tmp_path):
    config = RetrievalConfig(store=LocalStoreConfig(folder=str(tmp_path)))
    with pytest.raises(ValueError, match="give its fingerprint"):
        await open_retriever(config, words, LexicalEmbedder())
