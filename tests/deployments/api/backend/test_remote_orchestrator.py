"""The way to the orchestrator: as a gRPC message, or by reference if too large; and its loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from cluster import affinity
from cluster.circuit_breaker import CircuitBreaker
from deployments.api.backend import remote_orchestrator as module
from deployments.api.backend.readiness import Readiness
from deployments.api.backend.remote_orchestrator import RemoteOrchestrator
from deployments.api.http.error_responses import http_error
from rapid.chat_messages import Document, Message
from rapid.errors import BadRequest, OrchestratorLost, Overloaded
from rapid.messages import GenerateRequest
from tests.deployments.scripted import STARTED, events_of

LONG = "x" * (2**20 + 1)
BEGUN = replace(STARTED)  # after which nothing comes


class ScriptedHandle:
    """A Serve handle that remembers its options, and answers nothing or fails."""

    app_name = "rapid"
    deployment_name = deployment_id = "Orchestrator"

    def __init__(self, failure: Exception | None = None, *events: Any) -> None:
        self.failure, self.events = failure, [*events]

    def options(self, **options: Any) -> ScriptedHandle:
        self.given = options
        return self

    def remote(self, request: GenerateRequest) -> ScriptedHandle:
        return self

    def __aiter__(self) -> ScriptedHandle:
        return self

    async def __anext__(self) -> Any:
        if self.events:
            return self.events.pop(0)
        raise self.failure or StopAsyncIteration

    def cancel(self) -> None:
        pass


def remote(handle: Any) -> RemoteOrchestrator:
    return RemoteOrchestrator(handle, Readiness("rapid", {"orchestrator": "target"}))


@pytest.mark.parametrize(
    ("fields", "by_reference"),
    [
        ({}, False),
        ({"documents": (Document("a", LONG),)}, True),
        ({"documents": (Document(LONG, "a"),)}, True),
        ({"messages": (Message("user", LONG),)}, True),
        ({"query": LONG}, True),
        ({"stop": (LONG,)}, True),
    ],
)
async def test_every_text_of_the_caller_counts(fields: Any, by_reference: bool) -> None:
    handle = ScriptedHandle(None, STARTED)
    settings = {"messages": (Message("user", "Which?"),)} | fields
    request = GenerateRequest("r", "local", **settings)
    await events_of(remote(handle), request)
    assert handle.given["_by_reference"] == by_reference


@pytest.mark.parametrize(("is_streamed", "method"), [(True, "generate"), (False, "answer")])
async def test_text_comes_in_pieces_only_to_a_caller_who_reads_them(
    is_streamed: bool, method: str
) -> None:
    handle = ScriptedHandle(None, STARTED)
    request = GenerateRequest("r", "local", (), is_streamed=is_streamed)
    await events_of(remote(handle), request)
    assert handle.given["method_name"] == method


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (ActorUnavailableError("gone", bytes(16)), OrchestratorLost),
        (DeploymentUnavailableError("Orchestrator"), OrchestratorLost),  # type: ignore[arg-type]
        (Overloaded("The target pool is full."), Overloaded),
        (KeyError("a bug over there"), KeyError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
async def test_an_orchestrator_that_is_lost_is_no_bug(
    failure: Exception, raised: type[Exception]
) -> None:
    assert type(await caught(failure)) is raised


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_what_the_orchestrator_raised_reaches_the_client_without_rays_wrapping(
    depth: int,
) -> None:
    failure: Exception = BadRequest("No.", "n")
    for _ in range(depth):
        failure = RayTaskError("generate", "a traceback", failure).as_instanceof_cause()
    error = http_error(await caught(failure))
    assert (error.status, error.body["error"]["param"]) == (400, "n")
    assert error.body["error"]["message"] == "No."


@pytest.mark.parametrize("refusal", [BadRequest("No.", "n"), Overloaded("Full.", 3.2)])
async def test_a_refusal_comes_as_an_event_and_is_raised(refusal: Exception) -> None:
    """Serve would log what crosses it as an exception, as an error of this server."""
    with pytest.raises(type(refusal)) as raised:
        await events_of(remote(ScriptedHandle(None, refusal)), GenerateRequest("r", "local", ()))
    assert raised.value is refusal


async def test_what_cannot_be_subclassed_is_unwrapped_as_well() -> None:
    error = await caught(RayTaskError("generate", "a traceback", Overloaded("Full.", 3.2)))
    assert http_error(error).headers == {"retry-after": "4"}
    assert isinstance(error.__cause__, RayTaskError)  # the log shows the remote traceback


async def test_a_full_deployment_is_busy() -> None:
    error = http_error(await caught(BackPressureError(2, 1)))
    assert (error.status, error.body["error"]["message"]) == (503, "The server is busy.")
    assert (error.body["error"]["code"], error.headers) == ("overloaded", {"retry-after": "1"})


async def caught(failure: Exception) -> Exception:
    """What the ingress catches when the call of the orchestrator fails with `failure`."""
    request = GenerateRequest("r", "local", (Message("user", "Which?"),))
    with pytest.raises(Exception) as raised:  # noqa: PT011 (each test says which)
        await events_of(remote(ScriptedHandle(failure)), request)
    return raised.value


class StandStill:
    """A handle whose first calls bring nothing, and the last one an event."""

    app_name = "rapid"
    deployment_name = deployment_id = "Orchestrator"

    def __init__(self, num_silent: int, first: Any = None) -> None:
        self.num_silent, self.first, self.num_cancelled = num_silent, first, 0

    def options(self, **options: Any) -> StandStill:
        return self

    def remote(self, request: GenerateRequest) -> StandStill:
        self.num_silent -= 1
        return StandStill.Stream(self, self.num_silent < 0)  # type: ignore[return-value]

    class Stream:
        def __init__(self, handle: StandStill, answers: bool) -> None:
            self.handle, self.answers = handle, answers
            self.coming = [handle.first] * answers

        async def __anext__(self) -> Any:
            if self.coming:
                return self.coming.pop()
            if self.answers and self.handle.first is STARTED:
                raise StopAsyncIteration
            await asyncio.Future()

        def cancel(self) -> None:
            self.handle.num_cancelled += 1


class Router:
    """A router that says what a test wants, and notices what is given up."""

    is_empty = False

    def __init__(self, moves: bool, replica: str | None) -> None:
        self.moves, self.replica = moves, replica
        self.forgotten: list[GenerateRequest] = []

    def can_move(self, request: Any) -> bool:
        return self.moves

    def replica_of(self, request: GenerateRequest) -> str | None:
        return self.replica

    def forget(self, request: GenerateRequest) -> None:
        self.forgotten.append(request)


async def test_a_request_that_no_orchestrator_takes_is_sent_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    router, handle = Router(moves=True, replica=None), StandStill(2, STARTED)
    affinity.add_router("Orchestrator", router)
    request = GenerateRequest("r", "local", ())
    assert await events_of(remote(handle), request) == [STARTED]
    assert (handle.num_cancelled, router.forgotten) == (3, [request] * 3)


async def test_a_request_that_nobody_can_take_in_seconds_is_not_sent_round_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    router, handle = Router(moves=True, replica=None), StandStill(9)
    affinity.add_router("Orchestrator", router)
    beginning = remote(handle).begin(GenerateRequest("r", "local", ()), lambda _: None)
    coming = asyncio.ensure_future(beginning)
    while handle.num_silent > 6:  # noqa: ASYNC110 (it is sent to two more)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert (handle.num_silent, coming.done()) == (6, False)
    coming.cancel()


async def test_an_answer_that_has_begun_does_not_begin_again_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    router, handle = Router(moves=False, replica="a"), StandStill(0, BEGUN)
    affinity.add_router("Orchestrator", router)
    running = await remote(handle).begin(GenerateRequest("r", "local", ()), lambda _: None)
    assert running.started is BEGUN
    router.moves = True
    coming = asyncio.ensure_future(anext(running.rest))
    await asyncio.sleep(0.1)
    assert (handle.num_silent, coming.done()) == (-1, False)  # one call
    coming.cancel()


async def test_an_orchestrator_that_falls_silent_amid_an_answer_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    blame = CircuitBreaker()
    monkeypatch.setattr(module, "CIRCUITS", blame)
    router = Router(moves=False, replica="a")
    affinity.add_router("Orchestrator", router)
    service = remote(StandStill(0, BEGUN))
    silent: set[str] = set()
    monkeypatch.setattr(service._readiness, "is_silent", lambda _, each: each in silent)
    running = await service.begin(GenerateRequest("r", "local", ()), lambda _: None)
    rest = asyncio.ensure_future(anext(running.rest))
    await asyncio.sleep(0.05)
    assert not rest.done()
    silent.add("a")
    with pytest.raises(OrchestratorLost):
        await rest
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "ab"]
    assert blame.spare(replicas) == replicas[1:]


async def test_another_application_is_watched_like_this_one_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So an orchestrator of it that hangs is given up after seconds, as one of this application."""
    looks: list[str] = []
    monkeypatch.setattr(Readiness, "start", lambda self: looks.append("start"))
    monkeypatch.setattr(Readiness, "stop", lambda self: looks.append("stop"))
    monkeypatch.setattr(module, "handle_before_start", lambda *_: ScriptedHandle())
    (other,) = module.watch("next", {"Orchestrator": "target"})
    assert looks == ["start"]
    assert not (await other.ready())["ready"]
    other.close()
    assert looks == ["start", "stop"]


class Calls:
    """A Serve handle whose calls return what a test gives."""

    app_name = "rapid"
    deployment_name = deployment_id = "Orchestrator"

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[tuple[object, ...]] = []

    def options(self, *, method_name: str) -> Calls:
        self.asked.append((method_name,))
        return self

    async def remote(self, *arguments: object) -> object:
        self.asked[-1] += arguments
        return self.answer


async def test_what_generates_nothing_is_one_call_and_a_refusal_is_raised() -> None:
    request = GenerateRequest("r", "local", (), prompts=("a",))
    handle = Calls("told")
    assert await remote(handle).tokenize(request) == "told"
    assert await remote(handle).detokenize(request) == "told"
    assert await remote(handle).embed("local", ["a"], "m", "q") == "told"
    assert handle.asked == [
        ("tokenize", request),
        ("detokenize", request),
        ("embed", "local", ["a"], "m", "q"),
    ]
    with pytest.raises(BadRequest, match="odd"):
        await remote(Calls(BadRequest("odd"))).tokenize(request)
