"""The retriever's deployment: one store per replica, opened once and closed with it."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from deployments import metrics
from deployments.pools import retriever_replica
from rapid.chat_messages import Document
from rapid.checkpoints.text import ChatText
from rapid.errors import (
    BadRequest,
    RapidError,
    RetrievalPending,
    RetrievalUnavailable,
    UnknownModel,
)
from rapid.events import Reading, Tell
from retrieval import (
    EmbedderFailed,
    RetrievalConfig,
    RetrievalError,
    RetrievalTimings,
    RetrievedContext,
    StoreUnavailable,
)
from retrieval.embeddings.embedding import Embedding
from retrieval.embeddings.relevance import TextVectors
from tests.deployments.test_metrics import Instrument


def context_of(tenant: str) -> RetrievedContext:
    return RetrievedContext(
        chunks=(),
        cleared_floor=False,
        is_evidence=False,
        budget_tokens=9,
        document_ids=(tenant,),
        timings=RetrievalTimings(index_ms=1500.0, embed_ms=200.0, search_ms=50.0),
    )


READING = Reading(3, 9, "passages")


async def found(replica: retriever_replica.RetrieverReplica, *asked: Any) -> object:
    """The last thing that the replica says."""
    *_, last = [said async for said in replica.retrieve("call", *asked)]
    return last


class FakeRetriever:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.is_closed = False
        self.outage: str | None = None
        self.error: Exception | None = None
        self.may_go_on: asyncio.Event | None = None
        self.has_left = False
        self.num_indexing, self.num_chunks = 2, 64

    async def retrieve(
        self,
        tenant: str,
        documents: Sequence[Document],
        query: str,
        budget_tokens: int,
        wait_s: float,
        *,
        weight: int,
        tell: Tell,
    ) -> RetrievedContext:
        self.calls.append((tenant, documents, query, budget_tokens, wait_s, weight))
        tell(READING)
        if self.may_go_on is not None:
            try:
                await self.may_go_on.wait()
            finally:
                self.has_left = True
        if self.error:
            raise self.error
        return context_of(tenant)

    async def close(self) -> None:
        self.is_closed = True


class Opening:
    """Stands in for `open_retriever`, and takes its time."""

    def __init__(self) -> None:
        self.fake = FakeRetriever()
        self.configs: list[RetrievalConfig] = []
        self.may_end = asyncio.Event()

    async def __call__(
        self, config: RetrievalConfig, _: object, *, tokenizer: str
    ) -> FakeRetriever:
        assert tokenizer == ChatText.load("embedded:target").fingerprint
        self.configs.append(config)
        await self.may_end.wait()
        return self.fake


close = retriever_replica.RetrieverReplica.__del__


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Opening:
    opening = Opening()
    monkeypatch.setattr(retriever_replica, "open_retriever", opening)
    # Serve awaits it, and Python would not
    monkeypatch.delattr(retriever_replica.RetrieverReplica, "__del__")
    return opening


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the metrics of the test read."""
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, Instrument)
    monkeypatch.setattr(Instrument, "read", read := defaultdict[str, Any](int))
    return read


async def test_calls_that_come_at_once_open_one_store(opening: Opening) -> None:
    config = RetrievalConfig()
    replica = retriever_replica.RetrieverReplica(config, "embedded:target")
    assert opening.configs == []
    documents = [Document("a", "text")]
    asked = [
        asyncio.create_task(found(replica, tenant, documents, "who", 9, 1.0, 3)) for tenant in "xy"
    ]
    health = asyncio.create_task(replica.check_health())
    await asyncio.sleep(0)
    health.cancel()  # who waits for the store may leave, and it opens all the same
    opening.may_end.set()
    assert await asyncio.gather(*asked) == [context_of("x"), context_of("y")]
    assert opening.fake.calls == [(tenant, documents, "who", 9, 1.0, 3) for tenant in "xy"]
    assert opening.configs == [config]
    await close(replica)
    assert opening.fake.is_closed


async def test_what_it_holds_and_how_long_it_takes_is_counted(
    opening: Opening, read: dict[str, Any]
) -> None:
    opening.may_end.set()
    opening.fake.outage = "Qdrant does not answer"
    replica = retriever_replica.RetrieverReplica(RetrievalConfig(), "embedded:target", "m")
    await found(replica, "x", [], "who", 9, 1.0)
    await replica.check_health()
    assert read["rapid_retriever_index_seconds"] == [1.5]
    assert read["rapid_retriever_search_seconds"] == [0.25]
    assert read['rapid_retriever_end_total{outcome="ok"}'] == 1
    held = [read[f"rapid_retriever_{each}"] for each in ("indexing", "points", "away")]
    assert held == [2, 64, 1]
    await close(replica)


async def test_what_was_never_opened_is_not_closed(opening: Opening) -> None:
    replica = retriever_replica.RetrieverReplica(RetrievalConfig(), "embedded:target")
    await close(replica)
    assert opening.configs == []


async def test_a_store_that_is_away_is_told_and_leaves_the_replica_healthy(
    opening: Opening,
) -> None:
    opening.may_end.set()
    replica = retriever_replica.RetrieverReplica(RetrievalConfig(), "embedded:target")
    assert await replica.status() == {"is_away": False, "outage": None}
    opening.fake.outage = "Qdrant at http://q:6333 does not answer"
    assert await replica.status() == {"is_away": True, "outage": opening.fake.outage}
    await replica.check_health()
    await close(replica)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EmbedderFailed("CUDA error at /models/secret"), "The embedder failed"),
        (StoreUnavailable("http://q:6333 answered 500: secret"), "The store of chunks failed"),
    ],
)
async def test_what_the_embedder_and_the_store_say_stays_in_this_log(
    opening: Opening, error: RapidError, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    opening.may_end.set()
    opening.fake.error = error
    replica = retriever_replica.RetrieverReplica(RetrievalConfig(), "embedded:target")
    with (
        caplog.at_level(logging.WARNING, "deployments.pools.retriever_replica"),
        pytest.raises(RetrievalError, match=said) as raised,
    ):
        await found(replica, "x", [], "who", 9, 1.0)
    assert type(raised.value) is type(error)
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert "secret" in caplog.text
    opening.fake.error = RetrievalPending("later")
    with pytest.raises(RetrievalPending):
        await found(replica, "x", [], "who", 9, 1.0)
    await close(replica)


async def test_progress_is_said_at_once_and_who_leaves_waits_for_nothing(
    opening: Opening, read: dict[str, Any]
) -> None:
    opening.may_end.set()
    opening.fake.may_go_on = asyncio.Event()
    replica = retriever_replica.RetrieverReplica(RetrievalConfig(), "embedded:target", "m")
    saying = replica.retrieve("call", "x", [], "who", 9, 1.0)
    assert await anext(saying) == READING
    assert not opening.fake.has_left
    await saying.aclose()
    assert opening.fake.has_left
    assert read['rapid_retriever_end_total{outcome="left"}'] == 1
    await close(replica)


async def test_a_replica_that_is_long_at_work_gives_signs_of_life(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retriever_replica, "SIGN_EVERY_S", 0.01)
    opening.may_end.set()
    opening.fake.may_go_on = asyncio.Event()
    replica = retriever_replica.RetrieverReplica(RetrievalConfig(), "embedded:target", "m")
    saying = replica.retrieve("call", "x", [], "who", 9, 1.0)
    said = [await anext(saying)]
    while READING not in said or said.count(None) < 2:  # a sign may come before what was read
        said.append(await anext(saying))
    assert said.count(READING) == 1
    opening.fake.may_go_on.set()
    assert context_of("x") in [said async for said in saying]
    await close(replica)


class Undeployed(retriever_replica.RetrieverReplica):
    """A replica without Serve, which awaits the end that Python would not."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def test_texts_have_a_relevance_and_no_vectors_where_words_are_counted() -> None:
    replica = Undeployed(RetrievalConfig(), "embedded:target")
    texts = ["The harbor of Belaron is Tessin.", "It rains."]
    found = await replica.embed("call", "acme", texts, "lexical", "harbor")
    assert isinstance(found, TextVectors)
    assert found.scores[0] > found.scores[1] == 0
    assert found.num_tokens > 10
    refused = await replica.embed("call", "acme", texts, None)
    assert isinstance(refused, BadRequest)
    assert "no dense vectors" in str(refused)
    assert isinstance(await replica.embed("call", "acme", texts, "bge", "harbor"), UnknownModel)
    await close(replica)


async def test_dense_vectors_are_those_of_the_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dense(FakeRetriever):
        has_dense_vectors = True
        fails = False

        async def embed(self, tenant: str, texts: Sequence[str], query: str | None) -> Any:
            if self.fails:
                raise EmbedderFailed("no memory at /secret")
            return [Embedding(np.array([len(each), 0], np.float32), None) for each in texts], None

    dense = Dense()

    async def open_dense(*_: object, **__: object) -> Dense:
        return dense

    monkeypatch.setattr(retriever_replica, "open_retriever", open_dense)
    replica = Undeployed(RetrievalConfig(), "embedded:target")
    found = await replica.embed("call", "acme", ["abc", "d"], None)
    assert isinstance(found, TextVectors)
    assert found.vectors.tolist() == [[3, 0], [1, 0]]
    dense.fails = True
    refused = await replica.embed("call", "acme", ["abc"], None)
    assert isinstance(refused, RetrievalUnavailable)
    assert "secret" not in str(refused)
    await close(replica)
