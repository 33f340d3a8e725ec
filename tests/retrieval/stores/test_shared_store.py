"""Several retrievers on one server: what is shared, what is lost and found again, what expires."""

import asyncio
import logging

import pytest

from rapid.engine_status import Erasure
from rapid.errors import RetrievalPending, UnknownDocument
from retrieval import (
    Document,
    EmbedderFailed,
    LexicalEmbedder,
    RetrievalConfig,
    Retriever,
    StoreUnavailable,
    open_retriever,
)
from retrieval.settings import ServerStoreConfig
from retrieval.stores import shared_store as module
from retrieval.stores.manifests import CLAIM_S
from tests.retrieval.memory_server import MemoryServer
from tests.retrieval.rest_server import RestQdrant
from tests.retrieval.test_retriever import LETTER, QUESTION, SMALL, Watched
from tests.retrieval.tokens import words

TTL_S = 1000.0


class Cluster:
    """Retrievers with one embedder's books on one server, and a clock that is set."""

    def __init__(self):
        self.server = MemoryServer()
        self.embedder = Watched()
        self.now = 1e6
        self.retrievers = []

    def store(self, **settings):
        clock = {"ttl_s": TTL_S, "clock": lambda: self.now}
        return self.server.store(LexicalEmbedder.space, **clock | settings)

    def retriever(self, **settings):
        retriever = Retriever(SMALL, self.embedder, self.store(**settings), words)
        self.retrievers.append(retriever)
        return retriever

    @property
    def num_embedded(self):
        return self.embedder.passages


@pytest.fixture
async def cluster():
    cluster = Cluster()
    yield cluster
    for retriever in cluster.retrievers:
        await retriever.close()


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def alone():
    """What a retriever with a store of its own finds."""
    cluster = Cluster()
    retriever = cluster.retriever()
    found = await retriever.retrieve("local", [LETTER], QUESTION)
    await retriever.close()
    return found.chunks, cluster.num_embedded


async def test_a_document_is_embedded_once_over_four_retrievers_and_a_restart(cluster):
    chunks, once = await alone()
    four = [cluster.retriever() for _ in range(4)]
    asked = [each.retrieve("local", [LETTER], QUESTION) for each in four for _ in range(3)]
    assert {context.chunks for context in await asyncio.gather(*asked)} == {chunks}
    for each in four:
        await each.close()
    after = cluster.retriever()
    assert (await after.retrieve("local", [LETTER], QUESTION)).chunks == chunks
    assert cluster.num_embedded == once
    assert await cluster.server.num_chunks() == once


async def test_nothing_is_shared_with_another_tenant_tokenizer_or_embedder(cluster):
    _, once = await alone()
    await cluster.retriever().index("us", [LETTER])
    await cluster.retriever().index("them", [LETTER])
    await cluster.retriever(index="another tokenizer").index("us", [LETTER])
    assert cluster.num_embedded == await cluster.server.num_chunks() == 3 * once


async def test_who_waits_for_anothers_claim_takes_over_when_its_owner_is_killed(
    cluster, monkeypatch
):
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    chunks, once = await alone()
    other = cluster.retriever()
    await claim_and_die(cluster, await letter_id())
    asked = asyncio.create_task(other.retrieve("local", [LETTER], QUESTION))
    await asyncio.sleep(0.1)
    assert not asked.done()
    assert cluster.num_embedded == 0
    cluster.now += CLAIM_S + 1  # nobody renews it
    assert (await asked).chunks == chunks
    assert cluster.num_embedded == once


async def claim_and_die(cluster, document_id):
    """What a retriever leaves behind that is killed while it embeds a document."""
    killed = cluster.store()
    await killed._collection.prepare()
    await killed._manifests.claim("local", killed._document_key(document_id))


async def letter_id():
    """The id of the letter, as any retriever names it."""
    retriever = Cluster().retriever()
    (document_id,) = await retriever.index("local", [LETTER])
    await retriever.close()
    return document_id


async def test_a_certificate_says_what_it_does_not_reach_on_a_server(cluster):
    store = cluster.store()
    async with store.claim("local", "text-name"):
        await store.add("local", "text-name", [], [], 0)
    expected = Erasure("passages (the server's segments and log are the operator's)", 0, 1)
    assert await store.delete_text("local", "text") == expected


async def test_who_looked_before_anothers_claim_does_not_take_it(cluster, monkeypatch):
    first, second = cluster.store(), cluster.store()
    await first._collection.prepare()
    assert (await first._manifests.claim("local", "index/doc-1")).is_ours
    monkeypatch.setattr(second._manifests, "_is_claimable", lambda manifest: True)
    assert not (await second._manifests.claim("local", "index/doc-1")).is_ours


async def test_a_claim_that_is_renewed_is_waited_for(cluster, monkeypatch):
    monkeypatch.setattr(module, "CLAIM_S", 0.03)
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    first, second = cluster.retriever(), cluster.retriever()
    cluster.embedder.go_on.clear()
    asked = [asyncio.create_task(each.index("local", [LETTER])) for each in (first, second)]
    for _ in range(5):
        cluster.now += CLAIM_S - 1
        seen = cluster.server.calls["set_payload"]
        await until(lambda seen=seen: cluster.server.calls["set_payload"] >= seen + 2)
    cluster.embedder.go_on.set()
    await asyncio.gather(*asked)
    _, once = await alone()
    assert cluster.num_embedded == once


async def test_half_a_document_of_a_killed_retriever_is_finished(cluster):
    chunks, once = await alone()
    dying = cluster.retriever()

    def die(name):
        if name == "upsert" and cluster.server.calls["upsert"] == 3:
            cluster.server.is_away = True  # after the claim and the first half

    cluster.server.before = die
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("retrieval.stores.qdrant._POINTS_PER_UPSERT", once // 2)
        with pytest.raises(StoreUnavailable):
            await dying.index("local", [LETTER])
    cluster.server.is_away = False
    assert await cluster.server.num_chunks() == once // 2
    cluster.now += CLAIM_S + 1
    after = cluster.retriever()
    assert (await after.retrieve("local", [LETTER], QUESTION)).chunks == chunks
    assert await cluster.server.num_chunks() == once


@pytest.mark.parametrize("is_listed_first", [False, True])
@pytest.mark.parametrize("loss", ["points", "chunks of one", "collection"])
async def test_what_the_store_has_lost_is_indexed_again_and_found(cluster, loss, is_listed_first):
    retriever, note = cluster.retriever(), Document("note", "The harbor of Orrin is Vael.")
    before = await retriever.retrieve("local", [note, LETTER], QUESTION)
    listed = await retriever.list_chunks("local", LETTER.ref, 0, 99)
    if loss == "collection":
        await cluster.server.empty()
    else:
        records, _ = await cluster.server.client.scroll("chunks", limit=1000, with_payload=True)
        of_one = [r.id for r in records if r.payload.get("document") == "letter"]
        lost = of_one[3:4] if loss == "chunks of one" else [record.id for record in records]
        await cluster.server.client.delete("chunks", lost)
    if is_listed_first:
        assert await retriever.list_chunks("local", LETTER, 0, 99) == listed
    again = await retriever.retrieve("local", [note, LETTER], QUESTION)
    assert again.chunks == before.chunks != ()
    assert (await retriever.retrieve("local", [note, LETTER], QUESTION)).chunks == before.chunks


async def test_two_who_notice_a_loss_index_it_once(cluster):
    first, second = cluster.retriever(), cluster.retriever()
    for each in (first, second):
        await each.index("local", [LETTER])
    once = cluster.num_embedded
    await cluster.server.empty()
    asked = [each.retrieve("local", [LETTER], QUESTION) for each in (first, second) * 3]
    assert all(context.chunks for context in await asyncio.gather(*asked))
    assert cluster.num_embedded == 2 * once


async def test_a_loss_that_is_noticed_late_does_not_take_the_mending_away(cluster):
    await cluster.retriever().index("local", [Document("note", "The harbor of Orrin is Vael.")])
    mending, late = (cluster.store()._manifests for _ in range(2))
    assert (await mending.claim("local", "letter")).is_ours
    await late.revoke("local", "letter")
    assert not (await late.claim("local", "letter")).is_ours


async def test_what_is_lost_cannot_be_indexed_again_without_its_text(cluster):
    retriever = cluster.retriever()
    await retriever.index("local", [LETTER])
    assert (await retriever.retrieve("local", [LETTER.ref], QUESTION)).chunks
    await cluster.server.empty()
    with pytest.raises(UnknownDocument, match="send their texts again"):
        await retriever.retrieve("local", [LETTER.ref], QUESTION)
    assert (await retriever.retrieve("local", [LETTER], QUESTION)).chunks


async def test_documents_leave_the_server_when_nobody_has_used_them_for_the_time_to_live(cluster):
    used, unused = cluster.retriever(), cluster.retriever()
    note = Document("note", "The harbor of Orrin is Vael.")
    await used.index("local", [LETTER])
    await unused.index("local", [note])
    sweeper = cluster.store()
    for _ in range(3):
        cluster.now += 0.6 * TTL_S
        assert (await used.retrieve("local", [LETTER], QUESTION)).chunks
        await sweeper.sweep()
    documents = {payload.get("document") for payload in await cluster.server.points()}
    assert documents == {"letter", None}  # and one manifest
    cluster.now += 1.1 * TTL_S
    assert await sweeper.sweep() == 1
    assert await cluster.server.points() == []
    assert (await used.retrieve("local", [LETTER], QUESTION)).chunks


async def test_a_claim_whose_owner_died_long_ago_is_swept(cluster):
    await claim_and_die(cluster, "doc-1")
    assert len(await cluster.server.points()) == 1
    cluster.now += TTL_S + 1
    assert await cluster.store().sweep() == 1
    assert await cluster.server.points() == []


async def test_a_use_is_written_once_in_a_tenth_of_the_time_to_live(cluster):
    retriever = cluster.retriever()
    await retriever.index("local", [LETTER])
    for passed, written in ((0, 0), (0.05, 0), (0.06, 1), (0.05, 1), (0.06, 2)):
        cluster.now += passed * TTL_S
        await retriever.retrieve("local", [LETTER], QUESTION)
        assert cluster.server.calls["set_payload"] == written


async def test_room_for_others_is_made_in_memory_only(cluster):
    config = RetrievalConfig(chunk_tokens=16, max_cached_chunks=1)
    retriever = Retriever(config, cluster.embedder, cluster.store(), words)
    documents = [Document(name, f"The harbor of {name}.") for name in "abc"]
    for document in documents:
        await retriever.index("local", [document])
    assert len(retriever._entries) == len(retriever._store._point_ids) == 1
    assert await cluster.server.num_chunks() == 3
    await retriever.retrieve("local", documents, "harbor")
    assert cluster.num_embedded == 3
    await retriever.close()


async def test_a_server_that_is_away_is_asked_by_nobody_but_its_keeper(
    cluster, monkeypatch, caplog
):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    cluster.server.is_away = True
    store = cluster.store()
    await store.keep()  # it opens all the same
    retriever = Retriever(SMALL, cluster.embedder, store, words)
    assert "does not answer" in retriever.outage
    askers = set()
    cluster.server.before = lambda _: askers.add(asyncio.current_task())
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await retriever.retrieve("local", [LETTER], QUESTION)
        assert cluster.num_embedded == 0
    await until(lambda: askers == {store._keeper})
    cluster.server.is_away = False
    await until(lambda: retriever.outage is None)
    assert (await retriever.retrieve("local", [LETTER], QUESTION)).chunks
    cluster.server.is_away = True
    with pytest.raises(StoreUnavailable):
        await retriever.retrieve("local", [LETTER], QUESTION)
    assert retriever.outage
    assert "retrieval is back" in caplog.text
    await retriever.close()


async def test_what_nobody_expected_of_a_server_does_not_end_its_keeping(
    cluster, monkeypatch, caplog
):
    monkeypatch.setattr(module, "_LONGEST_SWEEP_S", 0.01)
    store = cluster.store()
    await store.keep()
    failures = iter([KeyError("no such field")] * 3)

    def fail(name):
        if name == "scroll" and (failure := next(failures, None)):
            raise failure

    cluster.server.before = fail
    swept = cluster.server.calls["scroll"]
    await until(lambda: cluster.server.calls["scroll"] > swept + 4)
    assert "a sweep of the store failed" in caplog.text
    await store.close()


async def test_a_question_does_not_wait_for_minutes_of_indexing_which_goes_on(cluster):
    retriever = cluster.retriever()
    cluster.embedder.go_on.clear()
    with pytest.raises(RetrievalPending, match="still being indexed"):
        await retriever.retrieve("local", [LETTER], QUESTION, wait_s=0.05)
    cluster.embedder.go_on.set()
    assert (await retriever.retrieve("local", [LETTER], QUESTION)).chunks
    _, once = await alone()
    assert cluster.num_embedded == once


def test_a_name_is_of_what_decides_chunks_and_vectors_and_of_nothing_else():
    server = ServerStoreConfig(kind="server", url="http://localhost:6333")
    bge = {"kind": "bge-m3", "model": "m"}
    same = [
        {"embedder": bge},
        {"embedder": bge | {"device": "cpu"}, "budget_tokens": 4096},
        {"embedder": bge | {"batch_tokens": 9}, "store": server},
    ]
    others = [
        {},
        {"embedder": bge | {"model": "n"}},
        {"embedder": bge | {"max_length": 1024}},
        {"embedder": bge, "chunk_tokens": 256},
        {"embedder": bge, "max_chunk_chars": 256},
    ]
    names = [RetrievalConfig.model_validate(each).index_name("t") for each in same + others]
    assert len(set(names[:3])) == 1
    assert len({*names[2:], RetrievalConfig().index_name("another")}) == len(others) + 2


async def test_vectors_that_cannot_be_made_free_the_claim_before_it_runs_out(cluster):
    first, second = cluster.retriever(), cluster.retriever()
    cluster.embedder.error = EmbedderFailed("out of memory")
    with pytest.raises(EmbedderFailed, match="out of memory"):
        await first.index("local", [LETTER])
    cluster.embedder.error = None
    assert (await second.retrieve("local", [LETTER], QUESTION)).chunks


async def test_a_shared_store_wants_to_know_the_tokenizer():
    store = ServerStoreConfig(kind="server", url="http://localhost:1")
    with pytest.raises(ValueError, match="give its fingerprint"):
        await open_retriever(RetrievalConfig(store=store), words)


async def test_over_http_four_retrievers_share_lose_and_find_a_document():
    """The calls as they go over the wire; the server behind them is local mode."""
    chunks, once = await alone()
    rest, embedder = RestQdrant(), Watched()
    store = ServerStoreConfig(kind="server", url=rest.url)
    config = SMALL.model_copy(update={"store": store})
    four = [await open_retriever(config, words, embedder, tokenizer="words") for _ in range(4)]
    try:
        asked = [each.retrieve("local", [LETTER], QUESTION) for each in four]
        assert {context.chunks for context in await asyncio.gather(*asked)} == {chunks}
        assert embedder.passages == rest.num_chunks("rapid-chunks") == once
        rest.empty()
        assert (await four[0].retrieve("local", [LETTER], QUESTION)).chunks == chunks
        assert rest.num_chunks("rapid-chunks") == once
        rest.stop()
        with pytest.raises(StoreUnavailable, match=rest.url):
            await four[1].retrieve("local", [LETTER], QUESTION)
        rest.start()
        await until(lambda: four[1].outage is None)
        assert (await four[1].retrieve("local", [LETTER], QUESTION)).chunks == chunks
        assert embedder.passages == 2 * once
    finally:
        for each in four:
            await each.close()
        rest.stop()
