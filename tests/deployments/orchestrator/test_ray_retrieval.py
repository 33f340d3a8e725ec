"""Calls of the retriever's deployment: where they go, and what a lost replica costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.circuit_breaker import CircuitBreaker
from deployments.orchestrator.ray_retrieval import RayRetrieval, affinity
from rapid.chat_messages import Document, DocumentRef
from rapid.errors import (
    BadRequest,
    DrafterUnavailable,
    EngineFailed,
    RetrievalPending,
    RetrievalUnavailable,
)
from rapid.events import Reading, Tell

DOCUMENTS = [Document("note", "It rains."), Document("book", "It was a dark and stormy night.")]
FOUND = SimpleNamespace(chunks=(), cleared_floor=False, is_evidence=False)
LOST = ActorDiedError()
_FIND = "deployments.orchestrator.ray_retrieval.find_router"


class Sign:
    """A sign of life, which comes after three looks."""


class Response:
    """A Serve response whose answer is given, after what it says first; None never comes."""

    def __init__(self, answer: object) -> None:
        *self.said, self.answer = answer if isinstance(answer, list) else [answer]
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __anext__(self) -> Any:
        if self.said:
            said = self.said.pop(0)
            if not isinstance(said, Sign):
                return said
            await asyncio.sleep(0.03)
            return None
        await asyncio.sleep(30 if self.answer is None else 0)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Handle:
    """A handle whose calls are answered in turn."""

    deployment_id = "Retriever"

    def __init__(self, *answers: object) -> None:
        self.responses = [Response(answer) for answer in answers]
        self.calls: list[tuple[Any, ...]] = []
        self.sessions: list[str] = []
        self.retrieve = self

    def options(self, *, session_id: str, stream: bool) -> Handle:
        assert stream
        self.sessions.append(session_id)
        return self

    def remote(self, *args: Any) -> Response:
        self.calls.append(args)
        return self.responses[len(self.calls) - 1]


async def asked(
    handle: Handle, timeout_s: float = 20.0, tenant: str = "acme", tell: Tell | None = None
) -> Any:
    retrieval = RayRetrieval(handle, timeout_s)  # type: ignore[arg-type]
    return await retrieval.retrieve(tenant, DOCUMENTS, "who", 9, weight=3, tell=tell)


async def test_requests_about_the_same_documents_go_by_the_same_name() -> None:
    handle = Handle(FOUND, FOUND, FOUND)
    assert await asked(handle) is FOUND
    await asked(handle)
    await asked(handle, tenant="another")
    waits_s, weight = 18.0, 3  # less than its caller does
    assert handle.calls[0][1:] == ("acme", DOCUMENTS, "who", 9, waits_s, weight)
    assert len({call_id for call_id, *_ in handle.calls}) == 3
    first, second, third = handle.sessions
    assert first == second == affinity("acme", list(reversed(DOCUMENTS)))
    assert first == affinity("acme", [DOCUMENTS[1], Document("other", "It snows.")])
    assert third != first != affinity("acme", DOCUMENTS[:1])


async def test_a_long_text_is_sent_once_it_is_asked_for() -> None:
    note, book, atlas = DOCUMENTS[0], *(Document(name, name * 30_000) for name in ("book", "atlas"))
    handle = Handle((book.ref,), LOST, (atlas.ref,), FOUND)
    retrieval = RayRetrieval(handle, 20.0)  # type: ignore[arg-type]
    assert await retrieval.retrieve("acme", [note, book, atlas], "who", 9) is FOUND
    first, lost, again, last = (documents for _, _, documents, *_ in handle.calls)
    assert first == [note, book.ref, atlas.ref]
    assert lost == again == [note, book, atlas.ref]
    assert last == [note, book, atlas]


async def test_of_stored_documents_only_those_are_read_that_the_replica_does_not_know() -> None:
    book, atlas = (Document(name, name * 30) for name in ("book", "atlas"))
    read = list[DocumentRef]()

    class Library:
        async def resolve(self, _: str, refs: Sequence[DocumentRef]) -> tuple[Document, ...]:
            read.extend(refs)
            return tuple(each for each in (book, atlas) if each.ref in refs)

    handle = Handle((atlas.ref,), FOUND)
    retrieval = RayRetrieval(handle, 20.0, Library())  # type: ignore[arg-type]
    assert await retrieval.retrieve("acme", [book.ref, atlas.ref], "who", 9) is FOUND
    first, again = (documents for _, _, documents, *_ in handle.calls)
    assert first == [book.ref, atlas.ref]
    assert again == [book.ref, atlas]
    assert read == [atlas.ref]


class Router:
    """A router that finds once that a call would begin elsewhere, where no replica has taken it."""

    def __init__(self, taken_by: str | None = None, *, is_stranded: bool = False) -> None:
        self.num_moves, self.forgotten = 1, list[object]()
        self.taken_by, self.stranded = taken_by, is_stranded

    def replica_of(self, request: object) -> str | None:
        return self.taken_by

    def is_stranded(self, request: object) -> bool:
        return self.stranded

    def can_move(self, request: object) -> bool:
        self.num_moves -= 1
        return isinstance(request, str) and self.num_moves >= 0

    def forget(self, request: object) -> None:
        self.forgotten.append(request)


async def test_what_no_replica_takes_is_asked_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.orchestrator.ray_retrieval._LOOK_S", 0.01)
    handle, router = Handle(None, FOUND), Router()
    monkeypatch.setattr(_FIND, {"Retriever": router}.get)
    assert await asked(handle) is FOUND
    assert handle.calls[0] == handle.calls[1]
    assert handle.responses[0].is_cancelled
    assert router.forgotten == [handle.calls[0][0], handle.calls[0][0]]


async def test_a_call_that_no_replica_takes_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.orchestrator.ray_retrieval._LOOK_S", 0.01)
    handle, router = Handle(None), Router(is_stranded=True)
    monkeypatch.setattr(_FIND, {"Retriever": router}.get)
    with pytest.raises(DrafterUnavailable, match="No replica of the retriever answers"):
        await asked(handle)
    assert handle.responses[0].is_cancelled


async def test_a_replica_that_falls_silent_is_given_up_and_another_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.orchestrator.ray_retrieval._LOOK_S", 0.01)
    circuits = CircuitBreaker()
    monkeypatch.setattr("deployments.orchestrator.ray_retrieval.CIRCUITS", circuits)
    handle = Handle([Reading(0, 9, "passages"), None], FOUND)
    monkeypatch.setattr(_FIND, {"Retriever": Router("a")}.get)
    assert await asked(handle) is FOUND
    assert handle.responses[0].is_cancelled
    assert not handle.responses[1].is_cancelled
    assert circuits.is_open("a")


async def test_a_replica_that_gives_signs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.orchestrator.ray_retrieval._LOOK_S", 0.01)
    handle = Handle([Sign(), Sign(), Sign(), FOUND])
    monkeypatch.setattr(_FIND, {"Retriever": Router("a")}.get)
    assert await asked(handle) is FOUND
    assert len(handle.calls) == 1


async def test_a_lost_replica_is_asked_for_once_more() -> None:
    handle = Handle(LOST, FOUND)
    assert await asked(handle) is FOUND
    assert handle.calls[0] == handle.calls[1]
    with pytest.raises(DrafterUnavailable, match="was lost"):
        await asked(Handle(LOST, LOST))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (RetrievalPending("Ask again."), RetrievalPending),
        (DrafterUnavailable("The store is away."), DrafterUnavailable),
        (ValueError("a bug"), EngineFailed),
    ],
)
async def test_what_a_replica_refuses_is_not_asked_of_another(
    answer: Exception, told: type[Exception]
) -> None:
    remote = RayTaskError("retrieve", "Traceback ...", answer).as_instanceof_cause()
    handle = Handle(remote, FOUND)
    with pytest.raises(told):
        await asked(handle)
    assert len(handle.calls) == 1


async def test_who_does_not_answer_in_time_is_cancelled() -> None:
    handle = Handle(None)
    with pytest.raises(DrafterUnavailable, match=r"no answer within 0\.1 s"):
        await asked(handle, timeout_s=0.1)
    assert handle.responses[0].is_cancelled


async def test_a_caller_who_leaves_cancels_the_call() -> None:
    handle = Handle(None)
    task = asyncio.create_task(asked(handle))
    while not handle.calls:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle.responses[0].is_cancelled


async def test_what_a_replica_says_is_passed_on_and_it_keeps_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.orchestrator.ray_retrieval._LOOK_S", 0.05)
    said = [Reading(0, 0, "passages"), Reading(412, 1130, "passages")]
    handle, router, told = Handle([*said, None]), Router("a"), list[Reading]()
    monkeypatch.setattr(_FIND, {"Retriever": router}.get)
    with pytest.raises(DrafterUnavailable, match="no answer within"):
        await asked(handle, timeout_s=0.1, tell=told.append)
    assert told == said
    assert router.num_moves == 1  # it was not looked for another replica
    handle = Handle([*said, FOUND])
    assert await asked(handle) is FOUND


class EmbedHandle:
    """A handle of a retriever that makes of texts what a test gives, or nothing."""

    def __init__(self, answer: object) -> None:
        self.answer, self.embed = answer, self
        self.is_cancelled = False

    def options(self, *, session_id: str) -> EmbedHandle:
        assert session_id == "acme"
        return self

    def remote(self, call_id: str, *asked: object) -> EmbedHandle:
        assert asked == ("acme", ("a",), "m", None)
        return self

    def cancel(self) -> None:
        self.is_cancelled = True

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> object:
        await asyncio.sleep(30 if self.answer is None else 0)
        if isinstance(self.answer, ValueError | ActorDiedError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (BadRequest("no dense vectors", "model"), BadRequest),
        (ValueError("a bug"), EngineFailed),
        (LOST, RetrievalUnavailable),
        (None, RetrievalUnavailable),
    ],
)
async def test_vectors_that_cannot_be_had_are_refused(answer: object, error: type) -> None:
    handle = EmbedHandle(answer)
    with pytest.raises(error):
        await RayRetrieval(handle, 0.05).embed("acme", ["a"], "m", None)  # type: ignore[arg-type]
    assert handle.is_cancelled == (answer is None)


async def test_vectors_are_passed_on() -> None:
    retrieval = RayRetrieval(EmbedHandle("vectors"), 5)  # type: ignore[arg-type]
    assert await retrieval.embed("acme", ["a"], "m", None) == "vectors"  # type: ignore[comparison-overlap]


async def test_passages_are_listed_by_reference_unless_the_text_is_wanted() -> None:
    class ListHandle:
        def __init__(self, *answers: object) -> None:
            self.answers, self.asked, self.list_chunks = list(answers), list[object](), self

        def options(self, **_: object) -> ListHandle:
            return self

        def remote(self, _: str, *asked: object) -> asyncio.Future[object]:
            self.asked.append(asked)
            done = asyncio.get_running_loop().create_future()
            done.set_result(self.answers.pop(0))
            return done

    book = DOCUMENTS[1]
    handle = ListHandle(["a passage"], None, ["another"])
    retrieval = RayRetrieval(handle, 5)  # type: ignore[arg-type]
    assert await retrieval.list_chunks("acme", book, 3, 2) == ["a passage"]
    assert await retrieval.list_chunks("acme", book, 5, 2) == ["another"]  # type: ignore[comparison-overlap]
    asked = [("acme", each, first, 2) for each, first in ((book.ref, 3), (book.ref, 5), (book, 5))]
    assert handle.asked == asked
