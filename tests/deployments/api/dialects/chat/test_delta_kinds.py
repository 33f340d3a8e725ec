"""A kind of delta that nobody has made yet, from the orchestrator's events to the chat dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import pytest

from deployments.api.dialects.chat.wire import GrowingChoice, Json, ReplyFrame, Timing, render_delta
from deployments.orchestrator.pacing import pace
from rapid.answering.answers import gather_deltas, merge_answers
from rapid.errors import TargetUnavailable
from rapid.events import ChoiceDelta, Finished, GenerationEvent, TextDelta
from tests.deployments.scripted import receipt

FRAME = ReplyFrame("chatcmpl-1", 0, "m", "fp_1", has_logprobs=False, includes_usage=False)


@dataclass(frozen=True, slots=True)
class GestureDelta(ChoiceDelta):
    """A delta that is not text."""

    name: str


@render_delta.register
def _render_gesture(delta: GestureDelta) -> Json:
    return {"gesture": delta.name}


def words(*texts: str) -> Iterator[TextDelta]:
    return (TextDelta(0, text) for text in texts)


EVENTS: Sequence[GenerationEvent] = (
    *words("a", "b", "c"),
    GestureDelta(0, "nod"),
    *words("d", "e"),
    TextDelta(0, "", finish_reason="gestured"),
    Finished(receipt()),
)


async def events() -> AsyncGenerator[GenerationEvent]:
    for event in EVENTS:
        yield event


@pytest.mark.parametrize("is_gathered", [True, False])
async def test_another_kind_of_delta_keeps_its_place_and_reaches_the_stream(
    is_gathered: bool,
) -> None:
    sent = pace(gather_deltas(events()) if is_gathered else events(), 0.0)
    chunks = [FRAME.delta_chunk(each) async for each in sent if isinstance(each, ChoiceDelta)]
    choices = [chunk["choices"][0] for chunk in chunks]
    nod = next(at for at, each in enumerate(choices) if each["delta"] == {"gesture": "nod"})
    said = [each["delta"].get("content", "") for each in choices]
    assert ("".join(said[:nod]), "".join(said[nod:])) == ("abc", "de")
    assert choices[-1]["finish_reason"] == "gestured"  # finish reasons are open as well


def test_it_is_part_of_a_whole_answer_too() -> None:
    choice = GrowingChoice()
    for each in EVENTS:
        if isinstance(each, ChoiceDelta):
            choice.add(each)
    (whole,) = FRAME.completion([choice], receipt(), Timing(0.0))["choices"]
    assert whole["message"] == {
        "role": "assistant",
        "content": "abcde",
        "gesture": "nod",
        "refusal": None,
    }
    assert whole["finish_reason"] == "gestured"


async def test_what_came_of_it_before_a_failure_comes() -> None:
    async def failing() -> AsyncGenerator[ChoiceDelta]:
        yield GestureDelta(0, "nod")
        raise TargetUnavailable("lost")

    seen = []

    async def look() -> None:
        async for delta in merge_answers([failing(), failing()]):
            seen.append(delta)

    with pytest.raises(TargetUnavailable):
        await look()
    assert GestureDelta(0, "nod") in seen


def test_a_kind_without_words_in_the_dialect_is_an_error() -> None:
    with pytest.raises(TypeError, match="a ChoiceDelta has no place in a chat completion"):
        FRAME.delta_chunk(ChoiceDelta(0))
