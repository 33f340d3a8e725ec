"""Documents that join a chat later: what was read before is not read again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rapid
from rapid.answering.request import RequestRun
from rapid.chat_messages import Document, Message
from rapid.config import Mode
from rapid.events import Finished
from rapid.messages import GenerateRequest, SpeculationRequest
from rapid.pair.pair import Pair
from rapid.prompts import target_messages
from rapid.receipt import Receipt

FIRST = Document("first", "The banner of Tezawe is sozo sema 40. " * 8)
SECOND = Document("second", "The well of Ruki is dry. " * 8)


def test_a_document_stands_where_it_came() -> None:
    chat = (
        Message("user", "One?"),
        Message("assistant", "Yes."),
        Message("user", "Two?", documents=("second", "gone")),
    )
    before = target_messages(chat[:1], [FIRST])
    first, said, second = target_messages(chat, [FIRST, SECOND])
    assert (first, said) == (*before, chat[1])
    assert second.text == f'Document "second":\n{SECOND.text}\n\nTwo?'
    at_once = target_messages([*chat[:2], Message("user", "Two?")], [FIRST, SECOND])
    assert at_once[0].text.startswith(first.text.removesuffix("One?"))
    assert at_once[2].text == "Two?"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with rapid.open("embedded:target", drafter="embedded:drafter") as pair:
        yield pair


def ask(pair: Pair, chat: list[Message], *documents: Document, mode: Mode = "plain") -> Receipt:
    request = GenerateRequest(
        "r",
        "t",
        tuple(chat),
        documents,
        max_tokens=4,
        temperature=0.0,
        speculation=SpeculationRequest(mode=mode),
    )

    async def run() -> Receipt:
        async for event in RequestRun(pair._services, request).events():
            if isinstance(event, Finished):
                return event.receipt
        raise AssertionError

    return pair._loop.run(run)


def test_only_what_joined_is_computed(pair: Pair) -> None:
    chat = [Message("user", "What is the banner of Tezawe?")]
    begun = ask(pair, chat, FIRST)
    chat += [Message("assistant", "It is sozo sema 40."), Message("user", "And the well of Ruki?")]
    in_front = ask(pair, chat, SECOND, FIRST)
    joined = ask(
        pair, [*chat[:2], Message("user", chat[2].text, documents=("second",))], FIRST, SECOND
    )
    page = 16
    assert joined.cached_tokens >= begun.prompt_tokens // page * page - page
    assert in_front.cached_tokens < begun.prompt_tokens // 2
    computed = joined.prompt_tokens - joined.cached_tokens
    assert computed < in_front.prompt_tokens - in_front.cached_tokens


def test_the_receipt_says_what_a_follow_up_was_searched_for_with(pair: Pair) -> None:
    chat = [
        Message("user", "What is the banner of Tezawe?"),
        Message("assistant", "The banner of Tezawe is sozo sema 40."),
        Message("user", "Why is that?"),
    ]
    joined = "What is the banner of Tezawe? Why is that?"
    assert ask(pair, chat, FIRST, mode="fused").joined_query == joined
    assert ask(pair, chat, FIRST).joined_query is None  # nothing was searched
    assert ask(pair, chat[:1], FIRST, mode="fused").joined_query is None
