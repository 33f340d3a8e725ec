import asyncio
import threading
from itertools import count
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from rapid.chat_messages import ChunkSizes
from rapid.documents import name_text
from rapid.embedded.generator import generate_document
from rapid.engine_status import Erasure
from rapid.errors import RetrievalPending, UnknownDocument
from rapid.events import Reading
from retrieval import (
    Document,
    EmbedderFailed,
    LexicalEmbedder,
    RetrievalConfig,
    Retriever,
    StoreUnavailable,
    indexing,
    open_retriever,
)
from retrieval import retriever as module
from retrieval.indexing import key_of
from tests.retrieval.plain_store import PlainChunkStore
from tests.retrieval.tokens import words

SMALL = RetrievalConfig(chunk_tokens=16, budget_tokens=48)
QUESTION = "What is the harbor of Belaron?"
FILLER = "The mills of Orrin grind slowly and the mayor sleeps. Rain falls on them all day. "
LETTER = Document("letter", FILLER * 8 + "The harbor of Belaron is Tessin. " + FILLER * 8)


class Watched(LexicalEmbedder):
    """Counts its work, notes its thread, and can be held up or made to fail."""

    def __init__(self):
        self.passages = 0
        self.threads = set()
        self.go_on = threading.Event()
        self.go_on.set()
        self.has_begun = threading.Event()
        self.order = []
        self.error = None

    def embed_passages(self, texts):
        for text, embedding in zip(texts, super().embed_passages(texts), strict=True):
            self.threads.add(threading.current_thread())
            self.has_begun.set()
            assert self.go_on.wait(10)
            if self.error:
                raise self.error
            self.passages += 1
            self.order.append(text)
            yield embedding


@pytest.fixture
def embedder():
    return Watched()


@pytest.fixture
def store(embedder):
    return PlainChunkStore(embedder.space)


@pytest.fixture
async def retriever(embedder, store):
    retriever = Retriever(SMALL, embedder, store, words)
    yield retriever
    await retriever.close()


async def test_the_sentence_asked_for_is_found_where_it_stands(retriever):
    found = await retriever.retrieve("local", [LETTER], QUESTION)
    assert found.cleared_floor
    (best,) = [chunk for chunk in found.chunks if "Belaron" in chunk.text]
    assert LETTER.text[best.start : best.end] == best.text
    assert best.document == "letter"
    assert best.id.startswith(found.document_ids[0])
    assert "Tessin" in found.text
    assert found.num_tokens <= found.budget_tokens == 48
    assert found.timings.search_ms > 0


async def test_nothing_to_do_with_the_question_means_no_evidence(retriever):
    found = await retriever.retrieve("local", [LETTER], "Which comets did Halley see?")
    assert (found.chunks, found.cleared_floor, found.text) == ((), False, "")


async def test_a_shared_word_is_shown_and_is_no_evidence_unless_a_floor_is_set(store):
    question = "What is the harbor of Rowi?"
    for floor, is_evidence in ((None, False), (0.0, True)):
        config = SMALL.model_copy(update={"floor": floor})
        retriever = Retriever(config, LexicalEmbedder(), store, words)
        found = await retriever.retrieve("local", [LETTER], question)
        assert "harbor" in found.text
        assert (found.cleared_floor, found.is_evidence) == (True, is_evidence)
        assert (await retriever.retrieve("local", [LETTER], QUESTION)).is_evidence
        await retriever.close()


async def test_evidence_that_does_not_fit_is_still_evidence(retriever):
    found = await retriever.retrieve("local", [LETTER], QUESTION, budget_tokens=3)
    assert (found.chunks, found.cleared_floor) == ((), True)


async def test_documents_keep_the_order_they_were_given_in(retriever):
    documents = [Document(name, f"The harbor of {name} is deep.") for name in "cab"]
    found = await retriever.retrieve("local", documents, "harbor")
    assert [chunk.document for chunk in found.chunks] == ["c", "a", "b"]


async def test_every_cut_is_a_document_of_its_own_and_shared_words_are_read_once(embedder, store):
    lines = "".join(f"The harbor of port {number} is deep.\n" for number in range(80))
    retriever = Retriever(RetrievalConfig(chunk_tokens=64), embedder, store, words)
    ids = set()
    for sizes in (None, ChunkSizes(16), ChunkSizes(16, 4), ChunkSizes(16, 8)):
        document = Document("ports", lines, chunk_sizes=sizes)
        await retriever.index("us", [document])
        found = await retriever.retrieve("us", [document.ref], "harbor", budget_tokens=700)
        assert "".join(each.text for each in found.passages) == lines
        assert found.num_tokens == len(words(lines))
        assert all(lines[each.start : each.end] == each.text for each in found.chunks)
        has_overlap = sizes is not None and sizes.overlap > 0
        assert has_overlap == (sum(each.num_tokens for each in found.chunks) > found.num_tokens)
        assert store.stored["us", found.document_ids[0]].num_tokens == found.num_tokens
        ids.add(found.document_ids)
    assert len(ids) == 4
    assert (await retriever.forget_text("us", name_text("us", document.digest))).num_found == 4
    await retriever.close()


def test_documents_keep_the_ids_under_which_stores_have_them():
    for sizes, id_of_name in (
        (None, "18e11e51080bbba4d0d9e9c2"),
        (ChunkSizes(800), "75d41d6074dc9a63ec63c745"),
    ):
        document = Document("a.txt", "text", chunk_sizes=sizes)
        found = key_of("acme", document)
        assert found == ("acme", f"doc-6f1b2012a733fbcba9595afe9650b5c5-{id_of_name}")


async def test_a_document_is_embedded_once_and_off_the_event_loop(retriever, embedder):
    first = await retriever.retrieve("local", [LETTER], QUESTION)
    work = embedder.passages
    assert await retriever.index("local", [LETTER, LETTER]) == first.document_ids * 2
    again = await retriever.retrieve("local", [LETTER.ref], QUESTION)
    assert again.chunks == first.chunks
    assert embedder.passages == work > 0
    assert threading.main_thread() not in embedder.threads


async def test_two_who_ask_at_once_share_the_work_and_one_may_leave(retriever, embedder):
    embedder.go_on.clear()
    asked = [asyncio.create_task(retriever.retrieve("local", [LETTER], QUESTION)) for _ in range(3)]
    await asyncio.sleep(0)
    asked[0].cancel()
    embedder.go_on.set()
    left, second, third = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(left, asyncio.CancelledError)
    assert second.chunks == third.chunks != ()
    assert embedder.passages == len(next(iter(retriever._store.documents.values())))


async def test_tenants_do_not_share_documents_even_with_equal_texts(retriever, embedder):
    (ours,) = await retriever.index("us", [LETTER])
    (theirs,) = await retriever.index("them", [LETTER])
    assert ours != theirs
    assert (await retriever.retrieve("them", [LETTER.ref], QUESTION)).document_ids == (theirs,)


async def test_a_reference_is_enough_where_this_tenants_document_is_indexed(retriever):
    note = Document("note", "It rains.")
    await retriever.index("us", [LETTER])
    assert await retriever.find_unknown("us", [LETTER.ref, note.ref, note]) == (note.ref,)
    assert await retriever.find_unknown("them", [LETTER.ref]) == (LETTER.ref,)
    for tenant, documents in (("us", [LETTER.ref, note.ref]), ("them", [LETTER.ref])):
        with pytest.raises(UnknownDocument, match="send their texts again"):
            await retriever.retrieve(tenant, documents, QUESTION)
    assert retriever.num_indexing == 0
    assert (await retriever.retrieve("us", [LETTER.ref, note], QUESTION)).chunks


async def test_a_failure_leaves_nothing_behind_and_the_next_try_works(retriever, embedder, store):
    embedder.error = EmbedderFailed("out of memory")
    with pytest.raises(EmbedderFailed, match="out of memory"):
        await retriever.retrieve("local", [LETTER], QUESTION)
    assert store.documents == {}
    embedder.error = None
    assert (await retriever.retrieve("local", [LETTER], QUESTION)).chunks


async def test_the_document_unused_for_longest_makes_room(embedder, store):
    config = RetrievalConfig(chunk_tokens=16, max_cached_chunks=3)
    retriever = Retriever(config, embedder, store, words)
    a, b, c, d = (Document(name, f"The harbor of {name}.") for name in "abcd")
    for document in (a, b, c, a, d):
        (last,) = await retriever.index("local", [document])
    kept = {chunk.document for items in store.documents.values() for chunk, _ in items}
    assert kept == {"a", "c", "d"}
    await retriever.forget("local", last)
    await retriever.forget("local", last)
    with pytest.raises(UnknownDocument):
        await retriever.retrieve("local", [d.ref], "harbor")
    await retriever.close()
    assert store.documents == {}


async def test_documents_in_use_stay_however_little_room_there_is(embedder, store):
    config = RetrievalConfig(chunk_tokens=16, max_cached_chunks=1)
    retriever = Retriever(config, embedder, store, words)
    documents = [Document(str(i), f"The harbor of number {i}.") for i in range(5)]
    found = await asyncio.gather(
        *(retriever.retrieve("local", documents[i:], "harbor") for i in range(4))
    )
    assert [len(f.chunks) for f in found] == [5, 4, 3, 2]
    assert len(store.documents) == 1
    await retriever.close()


async def test_a_document_larger_than_the_cache_stays_for_its_next_question(embedder, store):
    retriever = Retriever(
        RetrievalConfig(chunk_tokens=16, max_cached_chunks=2), embedder, store, words
    )
    (letter,) = await retriever.index("local", [LETTER])
    assert (await retriever.retrieve("local", [LETTER.ref], QUESTION)).chunks
    await retriever.index("local", [Document("note", "It rains.")])
    assert ("local", letter) in store.documents  # it counts as half of the cache
    await retriever.index("local", [Document("card", "It snows.")])
    assert ("local", letter) not in store.documents
    await retriever.close()


@pytest.mark.parametrize("steps", range(8))
async def test_who_comes_while_room_is_made_still_finds_the_document(embedder, store, steps):
    config = RetrievalConfig(chunk_tokens=16, max_cached_chunks=1)
    retriever = Retriever(config, embedder, store, words)
    a, b = (Document(name, f"The harbor of {name}.") for name in "ab")
    await retriever.index("local", [a])

    b_stored = asyncio.Event()
    add = store.add

    async def add_and_tell(*args):
        stored = await add(*args)
        b_stored.set()
        return stored

    async def come_back_to_a():
        await b_stored.wait()
        for _ in range(steps):
            await asyncio.sleep(0)
        return await retriever.retrieve("local", [a], "harbor")

    store.add = add_and_tell
    found, _ = await asyncio.gather(come_back_to_a(), retriever.index("local", [b]))
    assert found.cleared_floor
    await retriever.close()


async def test_a_context_does_not_depend_on_what_the_retriever_did_before():
    """Log lines repeat, so that many chunks score the same and the budget takes some of them."""
    lines = ["ERROR disk full", "ERROR disk slow", "WARN disk slow", "INFO job done on node seven"]
    log = Document("log", "\n".join(f"{i} {lines[i * i % 7 % 4]}" for i in range(400)))
    idle, used = [await open_retriever(SMALL, words) for _ in range(2)]
    for turn in range(3):
        other = Document("other", "\n".join(f"{i * 37} {lines[i % 3]}" for i in range(300 + turn)))
        for tenant in ("local", "another"):
            for each in (other, log):
                await used.retrieve(tenant, [each], "Which disk is full?")
            for key in [key for key in used._entries if key[0] == tenant]:
                await used.forget(*key)
    for question in [*lines, "Which disk is full?", "What is slow?", "seven", "ERROR", "17"]:
        for budget in (24, 48, 96):
            contexts = [
                await each.retrieve("local", [log], question, budget) for each in (idle, used)
            ]
            chosen, again = [[chunk.id for chunk in context.chunks] for context in contexts]
            assert chosen == again
    await idle.close()
    await used.close()


async def test_facts_of_generated_documents_are_found_within_a_small_budget():
    retriever = await open_retriever(RetrievalConfig(chunk_tokens=32, budget_tokens=192), words)
    for seed in range(3):
        generated = generate_document(f"retrieval {seed}", 1_500)
        document = Document(generated.name, generated.text)
        for question in generated.questions[:15]:
            if question.kind == "fact":
                found = await retriever.retrieve("local", [document], question.question)
                assert question.answer in found.text
    await retriever.close()


async def test_a_store_that_cannot_delete_does_not_cost_the_answer(embedder, store, caplog):
    config = RetrievalConfig(chunk_tokens=16, max_cached_chunks=1)
    retriever = Retriever(config, embedder, store, words)

    async def refuse(tenant, document_id):
        raise StoreUnavailable("no answer")

    store.delete = refuse
    documents = [Document(name, f"The harbor of {name}.") for name in "ab"]
    assert (await retriever.retrieve("local", documents, "harbor")).chunks
    assert "no answer" in caplog.text


@pytest.mark.parametrize("text", ["", " \n\n ", "***", "\udc80 lone surrogate harbor"])
async def test_odd_documents_are_fine(text):
    retriever = await open_retriever(SMALL, words)
    found = await retriever.retrieve("local", [Document("odd", text), LETTER], QUESTION)
    assert "Tessin" in found.text
    assert (await retriever.retrieve("local", [], QUESTION)).chunks == ()
    await retriever.close()


async def test_a_document_that_leaves_the_store_in_that_moment_is_unknown(retriever, store):
    key = key_of("local", LETTER)
    await retriever.index("local", [LETTER])
    await retriever.forget(*key)
    store.find_stored = AsyncMock(return_value={key[1]})  # it was there when this was asked
    with pytest.raises(UnknownDocument):
        await retriever.retrieve("local", [LETTER.ref], QUESTION)
    assert "Tessin" in (await retriever.retrieve("local", [LETTER], QUESTION)).text


async def test_what_a_search_can_find_is_listed_without_gaps(retriever, embedder, store):
    rules = Document("rules", ("- " * 20 + "\n\n" + "The harbor is deep. " * 4 + "\n\n") * 3)
    with pytest.raises(UnknownDocument):
        await retriever.list_chunks("local", rules.ref, 0, 9)
    chunks = await retriever.list_chunks("local", rules, 0, 99)
    assert chunks
    assert all("harbor" in each.text for each in chunks)  # the others have no words
    assert [each.id.rpartition(":")[2] for each in chunks] == [str(n) for n in range(len(chunks))]
    assert await retriever.list_chunks("local", rules.ref, 1, 2) == chunks[1:3]
    found = (await retriever.retrieve("local", [rules.ref], "harbor", 1_000)).chunks
    assert {each.id for each in found} <= {each.id for each in chunks}


# --- documents that nobody waits for --------------------------------------------------------------


def long_document(name, num_chunks=60):
    return Document(
        name, "".join(f"The harbor of {name} {i} is deep and old. " for i in range(num_chunks))
    )


async def begin(retriever, embedder, tenant, documents, **how):
    """Ask about documents, and return once the first passage is being embedded."""
    embedder.go_on.clear()
    embedder.has_begun.clear()
    asking = asyncio.create_task(retriever.retrieve(tenant, documents, "harbor", **how))
    await asyncio.to_thread(embedder.has_begun.wait, 10)
    return asking


async def leave(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def quiet(retriever):
    """Wait until no document is being indexed."""
    while retriever._threads._turns.num_inside or any(  # noqa: ASYNC110 (they end in threads)
        not entry.indexing.done() for entry in retriever._entries.values()
    ):
        await asyncio.sleep(0.001)


async def test_what_nobody_waits_for_ends_with_the_batch_and_whoever_asks_again_goes_on(
    retriever, embedder, store
):
    document = long_document("Orrin")
    asking = await begin(retriever, embedder, "local", [document])
    others = [
        asyncio.create_task(retriever.retrieve("local", [long_document(str(i))], "harbor"))
        for i in range(20)
    ]
    await asyncio.sleep(0)
    for task in (asking, *others):
        await leave(task)
    embedder.go_on.set()
    await quiet(retriever)
    assert embedder.passages <= 2 * indexing._PASSAGES_AT_ONCE  # one batch in each thread
    assert store.documents == {}
    assert len(retriever._entries) <= 2  # what was not begun is forgotten with its text

    embedder.order.clear()
    embedder.passages = 0
    assert (await retriever.retrieve("local", [document], "harbor")).chunks
    assert embedder.passages == len(set(embedder.order))
    (chunks,) = store.documents.values()
    whole = len(chunks)
    embedder.order.clear()
    await retriever.retrieve("another", [document], "harbor")
    assert len(embedder.order) == whole


async def test_a_question_that_comes_in_time_finds_what_an_earlier_one_left(retriever, embedder):
    document = long_document("Orrin")
    embedded = asyncio.Event()
    loop = asyncio.get_running_loop()
    asking = asyncio.create_task(
        retriever.retrieve("local", [document], "harbor", tell=lambda _: None)
    )
    advance = indexing.Passages.advance

    def advance_and_tell(passages, *args):
        goes_on = advance(passages, *args)
        if passages.embeddings:
            loop.call_soon_threadsafe(embedded.set)
        return goes_on

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(indexing.Passages, "advance", advance_and_tell)
        embedder.go_on.set()
        await embedded.wait()
        await leave(asking)
    await quiet(retriever)
    num_kept = embedder.passages
    assert num_kept >= indexing._PASSAGES_AT_ONCE
    assert (await retriever.retrieve("local", [document], "harbor")).chunks
    assert embedder.passages == len(set(embedder.order))  # none was embedded twice
    assert embedder.passages > num_kept


async def test_a_question_that_times_out_leaves_what_is_embedded(retriever, embedder):
    document = long_document("Orrin")
    asking = await begin(retriever, embedder, "local", [document], wait_s=0.01)
    with pytest.raises(RetrievalPending, match="still being indexed"):
        await asking
    await asyncio.gather(
        *(entry.indexing for entry in retriever._entries.values()), return_exceptions=True
    )
    embedder.go_on.set()  # only now does the first batch end
    assert (await retriever.retrieve("local", [document], "harbor")).chunks
    assert embedder.passages == len(set(embedder.order))


async def test_queries_take_turns(retriever, embedder, monkeypatch):
    asked, embed, go_on = [], embedder.embed_query, threading.Event()

    def embed_query(query):
        asked.append(query)
        assert go_on.wait(10)
        return embed(query)

    for tenant in ("us", "them"):
        await retriever.index(tenant, [LETTER])
    monkeypatch.setattr(embedder, "embed_query", embed_query)
    ours = [retriever.retrieve("us", [LETTER.ref], f"harbor {number}") for number in range(8)]
    ours = [asyncio.create_task(each) for each in ours]
    theirs = asyncio.create_task(retriever.retrieve("them", [LETTER.ref], "theirs"))
    while retriever._queries._turns.num_waiting < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    go_on.set()
    await asyncio.gather(*ours, theirs)
    assert asked.index("theirs") == 1


async def test_what_was_given_up_is_forgotten_on_any_thread(retriever, embedder):
    document = long_document("Orrin")

    async def forget(tenant):
        name = name_text(tenant, document.digest)
        return await asyncio.to_thread(retriever.drop_text, name)

    asking = await begin(retriever, embedder, "local", [document])
    running = await forget("local")
    assert (running.num_found, running.pending) == (0, "in use")
    await leave(asking)
    embedder.go_on.set()
    await quiet(retriever)
    assert (await forget("another")).pending is None
    dropped = await forget("local")
    assert (dropped.num_found, dropped.pending) == (1, "in use")
    assert dropped.num_bytes > len(document.text)
    assert (await forget("local")) == Erasure("texts")
    assert (await retriever.retrieve("local", [document], "harbor")).chunks
    assert len(embedder.order) > len(set(embedder.order))  # some were embedded anew


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 1, 3), (3, 1, 1)])
async def test_turns_between_batches_are_by_weight(embedder, store, monkeypatch, weights):
    # Every look at this clock is a second later: each batch costs one, however long it takes.
    monkeypatch.setattr("rapid.threads.time", SimpleNamespace(perf_counter=count().__next__))
    monkeypatch.setattr(module, "_DOCUMENTS_AT_ONCE", 1)
    retriever = Retriever(SMALL, embedder, store, words)
    embedder.go_on.clear()
    asking = [
        asyncio.create_task(retriever.retrieve(name, flood, "harbor", weight=weight))
        for name, weight in zip("abc", weights, strict=True)
        for flood in [[long_document(f"{name}{i}", 160) for i in range(6)]]
    ]
    await asyncio.to_thread(embedder.has_begun.wait, 10)
    embedder.go_on.set()
    await asyncio.gather(*asking)
    names = [next(name for name in "abc" if f"of {name}" in text) for text in embedder.order]
    until = min(len(names) - names[::-1].index(name) for name in "abc")  # the first is done
    num_done = [names[:until].count(name) for name in "abc"]
    for weight, each in zip(weights, num_done, strict=True):
        share = weight / max(weights)
        assert (share - 0.1) * max(num_done) < each < (share + 0.1) * max(num_done)
    await retriever.close()


async def test_tenants_take_turns_between_batches(retriever, embedder):
    flood = [long_document(f"flood{i}", 80) for i in range(12)]
    asking = await begin(retriever, embedder, "hostile", flood)
    other = asyncio.create_task(retriever.retrieve("other", [long_document("small", 10)], "harbor"))
    await asyncio.sleep(0)
    embedder.go_on.set()
    await other
    num_of_other = sum("small" in text for text in embedder.order)
    num_turns = 2 + num_of_other // indexing._PASSAGES_AT_ONCE  # one of them cuts the document
    num_before = len(embedder.order) - num_of_other
    assert num_before <= (1 + 2 * num_turns) * 2 * indexing._PASSAGES_AT_ONCE  # in two threads
    await asking
    assert len(embedder.order) > 3 * num_before


async def test_one_document_of_a_tenant_is_finished_before_the_next_begins(retriever, embedder):
    await retriever.index("local", [long_document("first"), long_document("second")])
    names = [text.split()[3] for text in embedder.order]
    assert names == sorted(names)


async def test_a_tenant_never_has_all_threads(retriever, embedder):
    """While a passage of one tenant takes for ever, another tenant is answered."""
    hold, go_on = embedder.go_on, threading.Event()
    flood = [long_document(f"flood{i}") for i in range(4)]
    asking = await begin(retriever, embedder, "hostile", flood)
    embedder.go_on = go_on
    go_on.set()  # for passages that begin from now on
    async with asyncio.timeout(10):
        assert (await retriever.retrieve("other", [long_document("a", 3)], "harbor")).chunks
    assert not any("flood" in text for text in embedder.order)
    hold.set()
    await asking


async def test_one_tenant_fills_half_of_the_room_for_those_who_wait(
    retriever, embedder, monkeypatch
):
    monkeypatch.setattr(module, "_MOST_WAITING", 8)
    asking = [await begin(retriever, embedder, "hostile", [long_document("0")])]
    for name in "1234567":
        asking.append(
            asyncio.create_task(retriever.retrieve("hostile", [long_document(name)], "harbor"))
        )
    await asyncio.sleep(0)
    other = asyncio.create_task(retriever.retrieve("other", [long_document("a", 3)], "harbor"))
    await asyncio.sleep(0)
    embedder.go_on.set()
    told = await asyncio.gather(*asking, return_exceptions=True)
    refused = [each for each in told if isinstance(each, RetrievalPending)]
    assert len(refused) == 4
    assert "Too many documents" in str(refused[0])
    assert (await other).chunks
    again = [await retriever.retrieve("hostile", [long_document(name)], "harbor") for name in "67"]
    assert all(each.chunks for each in again)


async def test_who_waits_is_told_how_many_passages_are_embedded(retriever, embedder, monkeypatch):
    monkeypatch.setattr(indexing, "_TELL_S", 0.001)
    document, told = long_document("Orrin"), []
    asking = await begin(retriever, embedder, "local", [document], tell=told.append)
    while not told:  # noqa: ASYNC110 (a clock tells)
        await asyncio.sleep(0.001)
    embedder.go_on.set()
    await asking
    whole = len(embedder.order)
    assert told[0] == Reading(0, whole, "passages")
    assert told == sorted(told, key=lambda each: each.num_read)


async def test_an_embedder_that_gives_too_few_vectors_fails(retriever, embedder, monkeypatch):
    monkeypatch.setattr(embedder, "embed_passages", lambda texts: iter(()))
    with pytest.raises(EmbedderFailed, match="gave 0 vectors of"):
        await retriever.retrieve("local", [LETTER], QUESTION)
