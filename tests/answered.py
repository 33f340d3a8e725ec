"""What a request of the scripted engines has come to."""

from __future__ import annotations

from rapid.chat_messages import Document
from rapid.events import Finished, GenerationEvent, TextDelta
from rapid.receipt import Receipt
from tests.fakes import scripted_token

ATLAS = (Document("atlas", "The lighthouse of Varo guards the northern strait.\n\n" * 8),)


def receipt(events: list[GenerationEvent]) -> Receipt:
    assert isinstance(events[-1], Finished)
    return events[-1].receipt


def tokens(events: list[GenerationEvent], choice: int = 0) -> tuple[int, ...]:
    explanation = receipt(events).explanation
    assert explanation is not None
    return explanation.token_ids[choice]


def script(seed: int, length: int, choice: int = 0) -> tuple[int, ...]:
    return tuple(scripted_token(seed, choice, position) for position in range(length))


def text(events: list[GenerationEvent], choice: int) -> str:
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return "".join(delta.text for delta in deltas if delta.choice == choice)
