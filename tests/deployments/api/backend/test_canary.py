"""Which of two versions answers a request, and what its receipt says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from deployments.api.backend.canary import WithCanary, position
from deployments.api.chat.wire import rapid_receipt
from deployments.config.serve_config import CanaryConfig
from rapid.errors import BadRequest, EngineFailed, Overloaded, TargetUnavailable
from rapid.messages import Document, Finished, GenerateRequest, Message, Reading
from tests.deployments.scripted import STARTED, ScriptedOrchestrator


class Other(ScriptedOrchestrator):
    """Another application, which is watched until it is closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Versions:
    """The service, with its own version and one other that is named `next`."""

    def __init__(self, *script: Any, share: float = 1.0) -> None:
        self.own, self.other = ScriptedOrchestrator(), Other(*script)
        self.watched: list[str] = []
        self.service = WithCanary(self.own, "rapid", self.watch)
        self.service.configure(CanaryConfig(application="next", share=share))

    def watch(self, application: str) -> Other:
        self.watched.append(application)
        return self.other

    async def answered(self, request: GenerateRequest | None = None) -> str | None:
        """The application that the receipt names."""
        *_, last = [event async for event in self.service.generate(request or about("a"))]
        assert isinstance(last, Finished)
        name: str | None = rapid_receipt(last.receipt).get("application")
        return name


def about(text: str, request_id: str = "r") -> GenerateRequest:
    documents = (Document("notes", text),)
    return GenerateRequest(request_id, "local", (Message("user", "Which?"),), documents)


async def test_the_share_decides() -> None:
    assert await Versions(share=1.0).answered() == "next"
    assert await Versions(share=0.0).answered() == "rapid"


async def test_a_service_of_one_version_names_none() -> None:
    versions = Versions()
    versions.service.configure(None)
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
    versions.service.configure(CanaryConfig(application="next", share=0.5))
    assert (versions.watched, versions.other.is_closed) == (["next"], False)
    versions.service.configure(CanaryConfig(application="later", share=0.5))
    assert (versions.watched, versions.other.is_closed) == (["next", "later"], True)
    versions.other.is_closed = False
    versions.service.configure(None)
    assert (versions.watched, versions.other.is_closed) == (["next", "later"], True)


async def test_who_leaves_is_noticed_by_the_version_that_answers() -> None:
    versions = Versions()
    events = versions.service.generate(about("a"))
    await anext(events)
    await events.aclose()
    assert versions.other.given_up.is_set()
