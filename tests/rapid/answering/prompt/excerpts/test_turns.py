"""A chat that does not fit loses its oldest turns if that was asked for, and says which."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rapid.answering.prompt.excerpts.turns import choose_turns, split_turns
from rapid.chat_messages import Document, Message, ToolCall
from rapid.checkpoints.text import ChatText
from rapid.errors import PromptTooLong
from rapid.messages import GenerateRequest
from tests.answered import receipt
from tests.local_pools import LocalApplication
from tests.ray_cluster import question

SMALL = {"max_context": 512, "kv_cache_tokens": 8192}
ATLAS = Document("atlas", "The lighthouse of Varo is white. ")
CALLS = tuple(ToolCall(name, "look", "{}") for name in "ab")
AGENT = (
    Message("system", "Be brief."),
    Message("assistant", "Hello."),
    Message("user", "One?"),
    Message("assistant", "", CALLS),
    Message("tool", "a", tool_call_id="a"),
    Message("tool", "b", tool_call_id="b"),
    Message("assistant", "One."),
    Message("system", "Be kind."),
    Message("user", "Two?"),
    Message("assistant", "", CALLS[:1]),
    Message("tool", "a", tool_call_id="a"),
    Message("assistant", "", CALLS[1:]),
    Message("tool", "b", tool_call_id="b"),
)


def test_calls_stay_with_their_results_and_system_texts_and_the_question_stay():
    assert split_turns(AGENT) == [(1,), (2, 3, 4, 5, 6), (9, 10)]
    assert split_turns(AGENT[:9]) == [(1,), (2, 3, 4, 5, 6)]
    assert split_turns(AGENT[7:9]) == []


def talk(num_turns: int, words: int = 3) -> tuple[Message, ...]:
    said = [("user", "assistant")[turn % 2] for turn in range(2 * num_turns)]
    told = [Message(role, f"<{number}> " + "word " * words) for number, role in enumerate(said)]
    return (*told, Message("user", "And now?"))


def test_the_latest_turns_stay_as_many_as_fit():
    def count(text: str) -> int:
        return len(text.split())

    messages = talk(10)  # eight words each
    assert choose_turns(messages, 80, count) == ()
    assert choose_turns(messages, 79, count) == (0, 1)
    assert choose_turns(messages, 16, count) == tuple(range(16))
    assert choose_turns(messages, 7, count) == tuple(range(20))


def test_a_chat_that_grows_is_cut_at_the_same_turn_for_a_while():
    def count(text: str) -> int:
        return len(text.split())

    cuts = [choose_turns(talk(number), 800, count) for number in range(300)]
    moved = sum(before != after for before, after in itertools.pairwise(cuts))
    assert 0 < moved < 60  # of 200 turns that did not fit
    kept = [2 * number - len(cut) for number, cut in enumerate(cuts)]
    assert min(kept[100:]) > 160  # messages of the 200 that fit


def ask(mode: str = "auto", *, truncates: bool = True, **fields: object) -> GenerateRequest:
    asked = question("r", mode=mode, seed=5, max_tokens=12, explain=True)
    head = (Message("system", "Be brief."), *talk(10, 20))
    speculation = replace(asked.speculation, truncates=truncates)
    fields = {"documents": (ATLAS,), "messages": (*head[:-1], *asked.messages)} | fields
    return replace(asked, speculation=speculation, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("mode", ["auto", "fused", "lossless", "plain"])
async def test_the_target_reads_the_latest_turns_and_the_receipt_names_the_others(
    mode: str, is_streamed: bool
):
    app = LocalApplication(engine=SMALL)
    request = ask(mode, is_streamed=is_streamed)
    answered = receipt(await app.answered(request))
    left_out = answered.left_out
    assert left_out == tuple(range(1, 1 + len(left_out)))
    assert 2 <= len(left_out) < 20
    assert answered.explanation is not None
    read = ChatText.load("embedded:target").decode([*answered.explanation.target_prompt_ids])
    assert "Be brief." in read
    assert ATLAS.text in read
    for place, message in enumerate(request.messages):
        assert (message.text in read) == (place not in left_out)
    assert len(answered.explanation.target_prompt_ids) + 12 <= 512


async def test_nothing_is_left_out_unasked_or_without_need():
    app = LocalApplication(engine=SMALL)
    with pytest.raises(PromptTooLong, match="truncation: auto"):
        await app.answered(ask(truncates=False))
    short = ask()
    short = replace(short, messages=(short.messages[0], *short.messages[-3:]))
    assert receipt(await app.answered(short)).left_out == ()


async def test_what_may_not_be_left_out_is_refused_if_it_is_too_long():
    app = LocalApplication(engine=SMALL)
    long = Document("atlas", "The lighthouse of Varo is white. " * 200)
    with pytest.raises(PromptTooLong, match="512"):
        await app.answered(ask("plain", documents=(long,)))


async def test_the_drafter_alone_searches_older_turns():
    app = LocalApplication(engine=SMALL)
    answered = receipt(await app.answered(ask("rag")))
    assert (answered.mode, answered.left_out) == ("rag", ())
