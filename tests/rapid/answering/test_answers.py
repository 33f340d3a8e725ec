from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from rapid.answering.answers import (
    GrowingAnswer,
    as_one,
    gather_deltas,
    join_neighbours,
    merge_answers,
)
from rapid.checkpoints.text import ChatText
from rapid.errors import GrammarTooComplex, TargetUnavailable
from rapid.events import CallDelta, Finished, GenerationEvent, Started, TextDelta, TokenText
from rapid.messages import TokenLogprobs, Verdict


@pytest.fixture(scope="module")
def chat_text() -> ChatText:
    return ChatText.load("embedded:target")


def verdict(position: int, token_ids: list[int], **fields: Any) -> Verdict:
    settings = {"num_drafted": len(token_ids), "num_accepted": len(token_ids), "is_finished": False}
    return Verdict(
        lease_id="l", choice=0, position=position, token_ids=tuple(token_ids), **settings | fields
    )


async def rounds(*verdicts: Verdict) -> AsyncIterator[Verdict]:
    for each in verdicts:
        yield each


async def test_the_last_delta_has_the_reason(chat_text: ChatText) -> None:
    ids = chat_text.encode("the harbor of the north")
    answer = GrowingAnswer(0, chat_text, (), max_tokens=len(ids))
    half = len(ids) // 2
    deltas = [
        d async for d in answer.follow(rounds(verdict(0, ids[:half]), verdict(half, ids[half:])))
    ]
    assert "".join(delta.text for delta in deltas) == "the harbor of the north"
    assert [delta.finish_reason for delta in deltas] == [None, "length"]
    assert answer.is_finished


async def test_an_answer_whose_grammar_becomes_too_complex_is_cut_with_what_was_held(
    chat_text: ChatText,
) -> None:
    """Other errors are not its own, and end all."""
    ids = chat_text.encode("the harbor of the north")

    async def fail(error: Exception) -> AsyncIterator[Verdict]:
        yield verdict(0, ids, logprobs=tuple(TokenLogprobs(each, -0.5) for each in ids))
        raise error

    answer = GrowingAnswer(0, chat_text, ("north pole",), max_tokens=2 * len(ids))
    deltas = [each async for each in answer.follow(fail(GrammarTooComplex("too many states")))]
    assert "".join(each.text for each in deltas if isinstance(each, TextDelta)) == (
        "the harbor of the north"
    )
    assert deltas[-1] == TextDelta(0, "north", (), "length")
    assert answer.is_finished
    with pytest.raises(TargetUnavailable):
        async for _ in GrowingAnswer(0, chat_text, (), 99).follow(fail(TargetUnavailable("gone"))):
            pass


async def test_every_delta_has_the_tokens_since_the_last(chat_text: ChatText) -> None:
    """Also those without text of their own: half a character, the beginning of a stop string."""
    for text, stop in (("the harbor é of", ()), ("the north of the", ("north pole",))):
        ids = chat_text.encode(text)
        answer = GrowingAnswer(0, chat_text, stop, max_tokens=len(ids))
        one_by_one = rounds(*(verdict(n, [each]) for n, each in enumerate(ids)))
        deltas = [delta async for delta in answer.follow(one_by_one)]
        assert len(deltas) < len(ids)
        assert sum(delta.num_tokens for delta in deltas) == len(ids)
        assert as_one(deltas).num_tokens == len(ids)


async def test_the_end_token_is_counted_and_not_shown(chat_text: ChatText) -> None:
    (eos,) = chat_text.eos_ids
    ids = [*chat_text.encode("done."), eos]
    answer = GrowingAnswer(0, chat_text, (), max_tokens=100)
    (delta,) = [d async for d in answer.follow(rounds(verdict(0, ids, is_finished=True)))]
    assert (delta.text, delta.finish_reason) == ("done.", "stop")
    assert answer.statistics.of_choice().completion_tokens == len(ids)


@pytest.mark.parametrize("is_continued", [True, False])
async def test_who_continues_a_text_is_told_what_its_end_is_worth(
    chat_text: ChatText, is_continued: bool
) -> None:
    (eos,) = chat_text.eos_ids
    answer = GrowingAnswer(0, chat_text, (), max_tokens=100, is_continued=is_continued)
    ended = verdict(0, [eos], is_finished=True, logprobs=(TokenLogprobs(eos, -0.5),))
    (delta,) = [d async for d in answer.follow(rounds(ended))]
    assert [each.logprob for each in delta.logprobs] == ([-0.5] if is_continued else [])


async def test_nothing_counts_after_a_stop_string(chat_text: ChatText) -> None:
    ids = chat_text.encode("one two three four five")
    answer = GrowingAnswer(0, chat_text, ("three",), max_tokens=100)
    logprobs = tuple(TokenLogprobs(token_id, -1.0) for token_id in ids)
    more = verdict(len(ids), ids)
    first = verdict(0, ids, logprobs=logprobs)
    (delta,) = [d async for d in answer.follow(rounds(first, more))]
    assert (delta.text, delta.finish_reason) == ("one two ", "stop")
    assert len(delta.logprobs) == len(answer.statistics.token_ids) < len(ids)
    assert answer.statistics.accepted == len(answer.statistics.token_ids)


@pytest.mark.parametrize("included", [False, True])
async def test_what_stops_an_answer_is_in_its_text_if_that_is_asked(
    chat_text: ChatText, included: bool
) -> None:
    ids = chat_text.encode("one two three four")
    logprobs = tuple(TokenLogprobs(token_id, -1.0) for token_id in ids)
    by_text = GrowingAnswer(0, chat_text, ("three",), 99, includes_stop=included)
    (delta,) = [d async for d in by_text.follow(rounds(verdict(0, ids)))]
    assert (delta.text, delta.finish_reason) == ("one two three"[: 13 if included else 8], "stop")
    by_token = GrowingAnswer(0, chat_text, (), 99, stop_ids=ids[-1:], includes_stop=included)
    whole = verdict(0, ids, is_finished=True, logprobs=logprobs)
    (delta,) = [d async for d in by_token.follow(rounds(whole))]
    assert delta.text == chat_text.decode(ids if included else ids[:-1])
    assert len(delta.logprobs) == len(ids) - (not included)


@pytest.mark.parametrize(("stop", "bonus"), [("three", 0), ("five", 1), ("six", 1)])
async def test_a_bonus_token_counts_only_where_a_stop_string_left_it(
    chat_text: ChatText, stop: str, bonus: int
) -> None:
    ids = chat_text.encode("one two three four five")
    answer = GrowingAnswer(0, chat_text, (stop,), max_tokens=len(ids))
    whole = verdict(0, ids, num_drafted=len(ids) - 1, num_accepted=len(ids) - 1)
    (delta,) = [d async for d in answer.follow(rounds(whole))]
    counts = answer.statistics.of_choice()
    assert counts.bonus == bonus
    assert counts.completion_tokens == counts.accepted + bonus
    assert delta.finish_reason == ("length" if stop == "six" else "stop")


async def test_the_deltas_of_choices_are_merged_and_the_first_failure_ends_all() -> None:
    async def good() -> AsyncIterator[TextDelta]:
        yield TextDelta(0, "a")
        yield TextDelta(0, "b", finish_reason="stop")

    async def bad() -> AsyncIterator[TextDelta]:
        yield TextDelta(1, "c")
        raise ZeroDivisionError

    deltas = [delta async for delta in merge_answers([good(), good()])]
    assert sorted(delta.text for delta in deltas) == ["a", "a", "b", "b"]
    with pytest.raises(ZeroDivisionError):
        _ = [delta async for delta in merge_answers([good(), bad()])]


async def test_a_failure_waits_for_what_other_choices_had_to_say() -> None:
    """Their tokens are counted and not generated again after a failover, so their text must go."""
    told = asyncio.Event()

    async def quick() -> AsyncIterator[TextDelta]:
        yield TextDelta(0, "a")
        yield TextDelta(0, "b", finish_reason="stop")
        told.set()

    async def failing() -> AsyncIterator[TextDelta]:
        yield TextDelta(1, "c")
        raise TargetUnavailable("gone")

    async def slow() -> AsyncIterator[TextDelta]:
        await told.wait()
        yield TextDelta(2, "d")
        await asyncio.sleep(60)
        raise AssertionError("it was not stopped")

    seen: list[TextDelta] = []

    async def read_slowly() -> None:
        async for delta in merge_answers([failing(), quick(), slow()]):
            await asyncio.sleep(0.01)  # meanwhile all have spoken
            seen.append(delta)

    with pytest.raises(TargetUnavailable):
        await read_slowly()
    assert sorted(delta.text for delta in seen) == ["a", "b", "c", "d"]
    assert [delta.finish_reason for delta in seen if delta.choice == 0] == [None, "stop"]


async def test_of_gathered_events_the_first_text_comes_at_once_and_the_rest_at_the_end() -> None:
    started, finished = Started("plain", "asked for", "target", "asked for"), Finished(None)  # type: ignore[arg-type]
    a, b = TokenText("a", -1.0), TokenText("b", -2.0)

    async def events() -> AsyncIterator[GenerationEvent]:
        yield started
        yield TextDelta(1, "one ")
        yield TextDelta(0, "a", (a,))
        yield TextDelta(1, "more", finish_reason="stop")
        yield TextDelta(0, "b", (b,), "length")
        yield finished

    assert [event async for event in gather_deltas(events())] == [
        started,
        TextDelta(1, "one "),
        TextDelta(0, "ab", (a, b), "length"),
        TextDelta(1, "more", (), "stop"),
        finished,
    ]


async def test_of_an_answer_that_fails_the_rest_does_not_come() -> None:
    async def events() -> AsyncIterator[GenerationEvent]:
        yield TextDelta(0, "a")
        yield TextDelta(0, "b")
        raise TargetUnavailable("lost")

    seen: list[GenerationEvent] = []

    async def look() -> None:
        async for event in gather_deltas(events()):
            seen.append(event)

    with pytest.raises(TargetUnavailable):
        await look()
    assert seen == [TextDelta(0, "a")]


def test_neighbours_of_one_kind_and_call_are_joined():
    begin = CallDelta(0, 0, "c", "f", "", begins=True, num_tokens=1)
    deltas = [
        TextDelta(0, "a"),
        TextDelta(0, "b", num_tokens=2),
        begin,
        CallDelta(0, 0, "c", "f", '{"a"', num_tokens=3),
        CallDelta(0, 0, "c", "f", ": 1}"),
        CallDelta(0, 1, "d", "f", "{}", begins=True),
        TextDelta(0, "", finish_reason="tool_calls"),
    ]
    text, first, second, end = join_neighbours(deltas)
    assert (text, end) == (TextDelta(0, "ab"), deltas[-1])
    assert first == replace(begin, arguments='{"a": 1}')
    assert (text.num_tokens, first.num_tokens, second) == (2, 4, deltas[5])
