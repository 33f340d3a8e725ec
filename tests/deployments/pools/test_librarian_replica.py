"""Every process is told to forget, and none that is silent is taken for one that has."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.pools import librarian_replica
from deployments.pools.librarian_replica import OrchestratorReader, ProcessTraces, RetrieverIndex
from rapid.chat_messages import Document, DocumentRef
from rapid.engine_status import Erasure
from rapid.errors import EngineFailed, Overloaded, RapidError, RetrievalUnavailable
from retrieval import EmbedderFailed, StoreUnavailable

REF = DocumentRef("a.txt", "digest", 10)


class Calls:
    """A remote method that notes its arguments, and answers or waits for ever."""

    def __init__(self, answer: Any = None, *, is_silent: bool = False) -> None:
        self.answer, self.is_silent = answer, is_silent
        self.asked: list[tuple[Any, ...]] = []

    async def remote(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        if self.is_silent:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception) and not isinstance(self.answer, Overloaded):
            raise self.answer
        return self.answer


def engine(**settings: Any) -> Any:
    return SimpleNamespace(forget=Calls((Erasure("memory", 8, 2),), **settings))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engines that run; a replica of the orchestrator has kept the text.

    One application keeps files alone, and one is of others.
    """
    engines = {"rapid/Target/a": engine(), "next/Drafter/b": engine()}
    monkeypatch.setattr(librarian_replica, "engines_of", lambda: dict(engines))
    monkeypatch.setattr(librarian_replica, "_SILENT_S", 0.05)
    running = {
        ("rapid", "orchestrator", "c"): "replica",
        ("files", "librarian", "d"): "replica",
        ("others", "orchestrator", "e"): "not asked",
    }
    monkeypatch.setattr(librarian_replica, "replicas", lambda: running)

    async def ask(actor: str, _: Any, name: str) -> Erasure:
        assert (actor, name) == ("replica", "name")
        return Erasure("texts", 5, 1)

    monkeypatch.setattr(librarian_replica, "ask_in_actor", ask)
    return engines


async def test_engines_of_all_applications_and_replicas_are_told(engines: dict[str, Any]) -> None:
    assert await ProcessTraces().forget("name") == [
        Erasure("orchestrator c: texts", 5, 1),
        Erasure("librarian d: texts", 5, 1),
        Erasure("target a: memory", 8, 2),
        Erasure("drafter b: memory", 8, 2),
    ]
    assert engines["rapid/Target/a"].forget.asked == [(frozenset({"name"}),)]


async def test_who_does_not_answer_may_have_something(engines: dict[str, Any]) -> None:
    engines["rapid/Target/a"] = engine(is_silent=True)
    engines["next/Drafter/b"].forget.answer = ValueError("a bug")
    found = await ProcessTraces().forget("name")
    assert {each.place: each.pending for each in found if each.pending} == {
        "target a": "no answer",
        "drafter b": "no answer",
    }


async def test_an_engine_that_is_new_is_told_once_of_all_deletions(engines: dict[str, Any]) -> None:
    traces = ProcessTraces()

    async def find() -> frozenset[str]:
        return frozenset({"x", "y"})

    engines["rapid/Target/a"] = engine(is_silent=True)
    for _ in range(2):
        await traces.remind(find)
    assert len(engines["next/Drafter/b"].forget.asked) == 1
    assert engines["rapid/Target/a"].forget.asked == 2 * [(frozenset({"x", "y"}),)]


async def test_every_model_reads_ahead_and_a_refusal_is_told() -> None:
    first, second = Calls(), Calls(Overloaded("busy"))
    handles: Any = [SimpleNamespace(prefill=each) for each in (first, second)]
    with pytest.raises(Overloaded, match="busy"):
        await OrchestratorReader(handles).prefill("a", REF)
    assert first.asked == second.asked == [("a", REF)]
    second.answer = ValueError("a bug")
    with pytest.raises(EngineFailed):
        await OrchestratorReader(handles).prefill("a", REF)


class Failing:
    """The stream of a call that fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __aiter__(self) -> Failing:
        return self

    async def __anext__(self) -> None:
        raise self.error

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (StoreUnavailable("Qdrant is away."), RetrievalUnavailable),
        (DeploymentUnavailableError(DeploymentID("Retriever")), RetrievalUnavailable),
        (EmbedderFailed("no memory"), EmbedderFailed),
        (ValueError("a bug"), EngineFailed),
    ],
)
async def test_a_store_that_is_away_is_told_from_an_embedder_that_failed(
    failure: Exception, told: type[RapidError]
) -> None:
    """For that one the library waits an hour."""
    index = SimpleNamespace(remote=lambda *_: Failing(failure))
    handle: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(index=index))
    with pytest.raises(RapidError) as raised:
        await RetrieverIndex([handle]).index("a", Document("a.txt", "text"), lambda _: None)
    assert type(raised.value) is told
