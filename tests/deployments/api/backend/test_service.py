"""An answer in two phases: it begins, and then it goes on."""

from __future__ import annotations

import pytest

from rapid.errors import EngineFailed, Overloaded
from rapid.events import GenerationEvent, Reading, TextDelta
from rapid.messages import GenerateRequest
from tests.deployments.scripted import STARTED, ScriptedOrchestrator

EMBEDDING = Reading(1, 9, "passages")
REQUEST = GenerateRequest("r", "local", ())


async def test_what_comes_before_the_start_is_told_and_the_rest_is_left() -> None:
    told: list[GenerationEvent] = []
    text = TextDelta(0, "Hel")
    service = ScriptedOrchestrator(EMBEDDING, STARTED, text)
    running = await service.begin(REQUEST, told.append)
    assert (told, running.started) == ([EMBEDDING], STARTED)
    assert [event async for event in running.rest] == [text]


@pytest.mark.parametrize("end", [None, Overloaded("Full.")])
async def test_an_answer_that_ends_before_its_start_is_an_error(end: Exception | None) -> None:
    service = ScriptedOrchestrator(EMBEDDING, *filter(None, [end]))
    with pytest.raises(type(end) if end else EngineFailed):
        await service.begin(REQUEST, lambda _: None)


async def test_closing_what_is_left_aborts_the_request() -> None:
    service = ScriptedOrchestrator(STARTED, TextDelta(0, "Hel"))
    running = await service.begin(REQUEST, lambda _: None)
    assert not service.given_up.is_set()
    await running.rest.aclose()
    assert service.given_up.is_set()
