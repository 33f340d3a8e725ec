"""Which model, and which of its two versions, answers a request, and what its receipt says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.api.backend.continuing import Cursor, continue_events
from deployments.api.backend.routes import Routes, position
from deployments.api.dialects.chat.wire import rapid_receipt
from deployments.config.api_config import CanaryConfig
from rapid.chat_messages import Document, Message
from rapid.errors import BadRequest, EngineFailed, Overloaded, TargetUnavailable
from rapid.events import Finished, Reading
from rapid.messages import GenerateRequest
from tests.deployments.scripted import STARTED, ScriptedOrchestrator


class Other(ScriptedOrchestrator):
    """Another application, which is watched until it is closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Versions:
    """The service of one model, with its own version and one other that is named `next`."""

    def __init__(self, *script: Any, share: float = 1.0) -> None:
        self.own, self.other = ScriptedOrchestrator(), Other(*script)
        self.watched: list[str] = []
        self.service = Routes([self.own], "rapid", self.watch)
        self.take(CanaryConfig(application="next", share=share))

    def take(self, canary: CanaryConfig | None) -> None:
        self.service.configure(["rapid"], canary)

    def watch(self, application: str) -> list[Other]:
        self.watched.append(application)
        return [self.other]

    async def answered(self, request: GenerateRequest | None = None) -> str | None:
        """The application that the receipt names."""
        return await answered(self.service, request or about("a"))


async def answered(service: Routes, request: GenerateRequest) -> str | None:
    events = continue_events(service, request, Cursor.first(request), lambda _: None)
    *_, last = [event async for event in events]
    assert isinstance(last, Finished)
    name: str | None = rapid_receipt(last.receipt).get("application")
    return name


def about(text: str, request_id: str = "r") -> GenerateRequest:
    documents = (Document("notes", text),)
    return GenerateRequest(
        request_id, "local", (Message("user", "Which?"),), documents, model="rapid"
    )


async def test_the_share_decides() -> None:
    assert await Versions(share=1.0).answered() == "next"
    assert await Versions(share=0.0).answered() == "rapid"


async def test_a_service_of_one_version_names_none() -> None:
    versions = Versions()
    versions.take(None)
    assert await versions.answered() is None


def test_requests_spread_evenly_and_those_of_one_document_stay_together() -> None:
    positions = [position(about(f"document {index}")) for index in range(2000)]
    assert sum(each < 0.1 for each in positions) == pytest.approx(200, abs=60)
    assert position(about("a", "r1")) == position(about("a", "r2"))
    plain = [GenerateRequest(f"r{n}", "local", (Message("user", "Why?"),)) for n in range(9)]
    assert len({position(each) for each in plain}) == 9


@pytest.mark.parametrize("error", [Overloaded("Full."), TargetUnavailable("Gone.")])
async def test_what_the_other_version_cannot_begin_is_answered_here(error: Exception) -> None:
    assert await Versions(error).answered() == "rapid"
    embedded = Reading(1, 9, "passages")
    assert await Versions(embedded, error).answered() == "rapid"


@pytest.mark.parametrize("script", [[BadRequest("No.")], [STARTED, EngineFailed("Broken.")]])
async def test_other_errors_are_the_callers_and_nothing_is_answered_twice(
    script: Sequence[Any],
) -> None:
    versions = Versions(*script)
    with pytest.raises(type(script[-1])):
        await versions.answered()
    assert versions.own.requests == []


async def test_a_version_that_is_not_ready_gets_nothing_until_it_is() -> None:
    versions = Versions()
    versions.other.state = {"ready": False}
    assert await versions.answered() == "rapid"
    assert versions.other.requests == []
    versions.other.state = {"ready": True}
    assert await versions.answered() == "next"


def test_a_version_is_watched_for_as_long_as_it_is_configured() -> None:
    versions = Versions(share=0.1)
    versions.take(CanaryConfig(application="next", share=0.5))
    assert (versions.watched, versions.other.is_closed) == (["next"], False)
    versions.take(CanaryConfig(application="later", share=0.5))
    assert (versions.watched, versions.other.is_closed) == (["next", "later"], True)
    versions.other.is_closed = False
    versions.take(None)
    assert (versions.watched, versions.other.is_closed) == (["next", "later"], True)


async def test_who_leaves_is_noticed_by_the_version_that_answers() -> None:
    versions = Versions()
    running = await versions.service.begin(about("a"), lambda _: None)
    await anext(running.rest)
    await running.rest.aclose()
    assert versions.other.given_up.is_set()


class TestSeveralModels:
    def of(self) -> tuple[Routes, list[ScriptedOrchestrator], list[Other]]:
        """The service of models `small` and `large`, theirs, and those of another version."""
        own, others = [ScriptedOrchestrator(), ScriptedOrchestrator()], [Other(), Other()]
        routes = Routes(own, "rapid", lambda application: others)
        routes.configure(["small", "large"])
        return routes, own, others

    async def ask(self, routes: Routes, model: str) -> str | None:
        return await answered(routes, replace(about("a"), model=model))

    async def test_the_model_of_a_request_picks_its_service(self) -> None:
        routes, (small, large), _ = self.of()
        for model in ("small", "large", "large"):
            assert await self.ask(routes, model) is None
        assert (len(small.requests), len(large.requests)) == (1, 2)

    async def test_each_has_its_other_version(self) -> None:
        routes, own, others = self.of()
        routes.configure(["small", "large"], CanaryConfig(application="next", share=1.0))
        assert await self.ask(routes, "large") == "next"
        assert [len(each.requests) for each in (*own, *others)] == [0, 0, 0, 1]

    async def test_a_new_name_is_the_same_service(self) -> None:
        routes, (small, _), _ = self.of()
        routes.configure(["tiny", "large"])
        for model in ("tiny", "small"):  # which an answer has that began with the earlier name
            await self.ask(routes, model)
        assert len(small.requests) == 2

    async def test_ready_is_when_all_of_them_are(self) -> None:
        routes, (_, large), _ = self.of()
        assert (await routes.ready())["models"] == {"small": True, "large": True}
        large.state = {"ready": False, "reason": "no target-large takes requests"}
        state = await routes.ready()
        assert (state["ready"], state["reason"]) == (False, "no target-large takes requests")
        assert state["models"] == {"small": True, "large": False}


async def test_tokens_are_those_of_the_model_that_is_named_and_vectors_of_the_first() -> None:
    services = [ScriptedOrchestrator(), ScriptedOrchestrator()]
    routes = Routes(services, "rapid", lambda _: ())
    routes.configure(["one", "two"])
    asked = GenerateRequest("r", "acme", (), prompts=("ab",), model="two")
    assert (await routes.tokenize(asked)).token_ids == (1, 97, 98)
    assert [len(each.requests) for each in services] == [0, 1]
    assert await routes.detokenize(replace(asked, prompts=((97,),))) == "a"
    assert (await routes.embed("acme", ["ab"], None)).model == "lengths"
