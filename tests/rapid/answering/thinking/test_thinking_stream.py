"""Answers with thinking before them: what is told apart, and what a request asks of the models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import date
from typing import Any

import pytest

from rapid.answering.answers import GrowingAnswer, join_neighbours
from rapid.answering.plan.request_plan import check_thinking, rule_thinking
from rapid.chat_messages import Message, ThinkingRequest
from rapid.checkpoints.text import ChatText
from rapid.checkpoints.thinking_marks import GRANITE, HARMONY, ThinkingMarks, find_marks
from rapid.config import ThinkingRule
from rapid.errors import BadRequest
from rapid.events import TextDelta, ThinkingDelta
from rapid.messages import GenerateRequest, TokenLogprobs, Verdict
from tests.rapid.calling.checkpoints_with_tools import text_of

TEXT = text_of("qwen")
DAY = date(2026, 1, 31)
THOUGHT = "<think>\nA stop. Is it é?\n\n Yes.\n</think>\n\nIt is é. stop here"


async def rounds(said: str, size: int, text: ChatText = TEXT) -> AsyncIterator[Verdict]:
    ids = [*text.encode(said), *text.eos_ids]
    for start in range(0, len(ids), size):
        tokens = tuple(ids[start : start + size])
        logprobs = tuple(TokenLogprobs(each, -0.5) for each in tokens)
        is_last = start + size >= len(ids)
        yield Verdict("l", 0, start, tokens, size, size, is_last, logprobs)


async def tell(said: str, size: int = 1, **settings: Any) -> tuple[str, str, GrowingAnswer, Any]:
    """The thinking, the answer, and how it grew."""
    settings = {"is_thinking": False, "max_tokens": 1000} | settings
    text = settings.pop("text", TEXT)
    answer = GrowingAnswer(0, text, settings.pop("stop", ()), **settings)
    deltas = [each async for each in answer.follow(rounds(said, size, text))]
    assert sum(each.num_tokens for each in deltas) == len(answer.statistics.token_ids)
    first_text = next(n for n, each in enumerate(deltas) if isinstance(each, TextDelta))
    assert not any(isinstance(each, ThinkingDelta) for each in deltas[first_text:])
    thoughts = "".join(each.text for each in deltas if isinstance(each, ThinkingDelta))
    texts = [each for each in deltas if isinstance(each, TextDelta)]
    return thoughts, "".join(each.text for each in texts), answer, texts


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_thinking_and_answer_are_told_apart_and_stops_look_at_the_answer(size: int) -> None:
    thoughts, said, answer, texts = await tell(THOUGHT, size, stop=[" stop", "\n\n"])
    assert (thoughts, said) == ("A stop. Is it é?\n\n Yes.", "It is é.")
    assert texts[-1].finish_reason == "stop"
    spelled = "".join(each.text for text in texts for each in text.logprobs)
    assert spelled.encode("utf-8", "surrogateescape").decode() == "It is é. stop"
    num_answer = len(TEXT.encode("It is é. stop"))
    counted = answer.statistics.of_choice()
    assert counted.thinking_tokens == counted.completion_tokens - num_answer


async def test_a_prompt_may_have_opened_it_and_the_end_may_come_within() -> None:
    assert (await tell("Hm.\n</think>\nYes", is_thinking=True))[:2] == ("Hm.", "Yes")
    thoughts, said, answer, texts = await tell("Hm, and", is_thinking=True)
    assert (thoughts, said, texts[-1].finish_reason) == ("Hm, and", "", "stop")
    assert not texts[-1].logprobs
    assert answer.statistics.thinking_tokens == len(answer.statistics.token_ids)
    thoughts, said, _, texts = await tell("Hm, and more", is_thinking=True, max_tokens=6)
    assert (thoughts, said, texts[-1].finish_reason) == ("Hm, an", "", "length")


@pytest.mark.parametrize(
    "said", ["\n\nNo <think> in it", "a<think>b</think>", "<think>a</think>b", ""]
)
async def test_what_is_no_thinking_is_text(said: str) -> None:
    thoughts, text, answer, _ = await tell(said, is_thinking=None)
    assert (thoughts, text, answer.statistics.thinking_tokens) == ("", said, 0)
    if not said.startswith("<"):
        assert (await tell(said))[:2] == ("", said)


FINAL = "<|channel|>final<|message|>"
SPOKEN = {
    "granite": ("Here is my thought process:", "Here is my response:"),
    "harmony": (HARMONY.opening, HARMONY.closing + FINAL),
}


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("family", SPOKEN)
async def test_thinking_may_stand_between_texts(family: str, size: int) -> None:
    text, (opening, closing) = text_of(family), SPOKEN[family]
    said = f"{opening}\n\nHere is é. Hm.\n{closing}\n\nIt is é. stop here"
    thoughts, told, answer, texts = await tell(said, size, text=text, stop=[" stop"])
    assert (thoughts, told) == ("Here is é. Hm.", "It is é.")
    assert texts[-1].finish_reason == "stop"
    spelled = "".join(each.text for part in texts for each in part.logprobs)
    assert spelled.encode("utf-8", "surrogateescape").decode() == "It is é. stop"
    counted = answer.statistics.of_choice()
    num_answer = len(text.encode("It is é. stop"))
    assert counted.thinking_tokens == counted.completion_tokens - num_answer
    thoughts, told, answer, texts = await tell(f"{opening} So", size, text=text)
    assert (thoughts, told, texts[-1].logprobs) == ("So", "", ())


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("family", "said", "told"),
    [
        ("granite", "Here is my thoughtful answer.", None),
        ("granite", " Here is my", None),
        ("granite", "Yes. Here is my thought process: none", None),
        ("granite", "", None),
        ("harmony", "Yes", None),
        ("harmony", f"{FINAL}Yes", "Yes"),
    ],
)
async def test_what_only_begins_like_thinking_is_the_answer(
    family: str, size: int, said: str, told: str | None
) -> None:
    text = text_of(family)
    thoughts, told_here, answer, texts = await tell(said, size, text=text)
    wanted = said if told is None else told
    assert (thoughts, told_here) == ("", wanted)
    assert "".join(each.text for part in texts for each in part.logprobs) == wanted
    assert (answer.statistics.thinking_tokens == 0) == (told is None)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_an_answer_without_its_mark_begins_behind_the_white_space(size: int) -> None:
    said = f"{HARMONY.opening}Hm.{HARMONY.closing}\n\nYes"
    thoughts, told, _, _ = await tell(said, size, text=text_of("harmony"))
    assert (thoughts, told) == ("Hm.", "Yes")


def test_thinking_that_ends_with_a_text_has_no_bound() -> None:
    def ask(**thinking: Any) -> GenerateRequest:
        asked = ThinkingRequest(**thinking)
        return GenerateRequest("r", "t", (Message("user", "Hi"),), thinking=asked)

    check_thinking(ask(is_on=True), GRANITE)
    for bound in ({"budget": 5}, {"share": 0.5}):
        with pytest.raises(BadRequest, match="turn thinking on or off, without a bound"):
            check_thinking(ask(**bound), GRANITE)
    asked = ThinkingRequest(is_on=True)
    assert rule_thinking(asked, GRANITE, 100, is_open=False, has_grammar=True) is None


async def test_neighbours_are_joined_by_their_kind() -> None:
    answer = GrowingAnswer(0, TEXT, (), 1000, is_thinking=False)
    deltas = [each async for each in answer.follow(rounds("<think>ab</think>cd", 1))]
    joined = [*join_neighbours(deltas)]
    assert [(type(each), each.text) for each in joined] == [  # type: ignore[attr-defined]
        (ThinkingDelta, "ab"),
        (TextDelta, "cd"),
    ]
    assert sum(each.num_tokens for each in joined) == len(answer.statistics.token_ids)


class TestPrompts:
    @pytest.mark.parametrize(
        ("family", "thinks", "is_thinking"),
        [
            ("qwen", None, False),
            ("qwen", True, False),
            ("qwen", False, None),  # its template has closed it
            ("deepseek", None, True),
            ("deepseek", False, True),  # its template does not ask
            ("hermes", None, None),
            ("granite", None, False),
            ("harmony", True, False),
        ],
    )
    def test_how_a_prompt_ends(
        self, family: str, thinks: bool | None, is_thinking: bool | None
    ) -> None:
        text = text_of(family)
        chat = [Message("user", "<think>Hi</think>")]
        ids = text.encode_chat(chat, day=DAY, thinks=thinks)
        assert text.find_thinking(ids) is is_thinking

    def test_what_was_thought_is_shown_to_templates_that_show_it(self) -> None:
        chat = [Message("user", "Hi"), Message("assistant", "Yes", thinking="Hm. </think>")]
        shown = TEXT.decode(TEXT.encode_chat(chat, day=DAY), shows_special=True)
        assert "<think>\nHm. </think>\n</think>\n\nYes" in shown
        marks = TEXT.thinking_marks
        assert marks is not None
        assert TEXT.encode_chat(chat, day=DAY).count(marks.closing) == 1  # the other is spelled

    def test_marks_are_tokens_that_a_template_writes(self) -> None:
        tokens = {7: "<think>", 8: "</think>", 9: "[THINK]", 10: "[/THINK]"}
        assert find_marks("... '</think>' ...", tokens) == ThinkingMarks(7, 8)
        assert find_marks("[THINK]", tokens) == ThinkingMarks(9, 10)
        assert find_marks("<think>", {7: "<think>"}) is None
        assert text_of("granite").thinking_marks == GRANITE
        assert text_of("harmony").thinking_marks == HARMONY
        assert find_marks("{{ messages }}", tokens) is None


class TestRules:
    MARKS = ThinkingMarks(3, 5)

    @pytest.mark.parametrize(
        ("asked", "budget"),
        [
            (ThinkingRequest(), None),
            (ThinkingRequest(is_on=True), None),
            (ThinkingRequest(is_on=False), 0),
            (ThinkingRequest(budget=7), 7),
            (ThinkingRequest(is_on=True, share=0.2), 20),
        ],
    )
    def test_a_budget_is_a_number_or_a_share(
        self, asked: ThinkingRequest, budget: int | None
    ) -> None:
        for is_open in (True, False):
            got = rule_thinking(asked, self.MARKS, 100, is_open=is_open, has_grammar=False)
            want = ThinkingRule(opening=3, closing=5, is_open=is_open, budget=budget)
            assert got == (None if budget is None else want)
            assert rule_thinking(
                asked, self.MARKS, 100, is_open=is_open, has_grammar=True
            ) == want.model_copy(update={"budget": budget})
        assert rule_thinking(asked, self.MARKS, 100, is_open=None, has_grammar=True) is None
        assert rule_thinking(asked, None, 100, is_open=None, has_grammar=True) is None

    def test_who_does_not_think_apart_cannot_be_asked_to(self) -> None:
        for asked, param in (
            (ThinkingRequest(is_on=True), "reasoning_effort"),
            (ThinkingRequest(budget=0), "thinking_token_budget"),
        ):
            request = GenerateRequest("r", "t", (Message("user", "Hi"),), thinking=asked)
            with pytest.raises(BadRequest, match="no thinking") as refused:
                check_thinking(request, None)
            assert refused.value.param == param
            check_thinking(request, self.MARKS)
        off = GenerateRequest("r", "t", (), thinking=ThinkingRequest(is_on=False))
        check_thinking(off, None)
