"""Refusals of the server in the words of options, files and commands."""

from __future__ import annotations

from typing import get_args

import pytest

from deployments.cli.questions import question_options
from deployments.cli.questions.error_words import advise
from rapid import config, transfers
from rapid.answering.plan.request_plan import RequestPlan, answer_tokens
from rapid.errors import PromptTooLong


def test_a_prompt_that_is_too_long_says_what_fits_and_how_to_ask_all_the_same() -> None:
    with pytest.raises(PromptTooLong) as refused:
        answer_tokens(None, 512, 8221, 8192, hint=" Shorten it.")
    error = {"message": str(refused.value)}
    assert advise(error, ["a.md"], 26_195) == (
        "the documents and the question are too long for the target: it reads 8,192 tokens, about "
        "26,102 of these 26,195 characters, and these are 8,221 tokens. Ask with --mode rag "
        "(the drafter reads what retrieval finds), with --sections (the target reads the passages "
        "that fit), or about fewer documents"
    )
    assert "Ask with /mode rag (" in advise(error, ["a.md"], 26_195, "command")


def test_also_where_it_was_not_tokenized_to_its_end() -> None:
    why = "the prompt has more than the 8192 tokens of the target's context."
    said = advise({"message": str(PromptTooLong.of(8192, why))}, ["a.md"], 343_000)
    assert "it reads 8,192 tokens, and these are more than that. Ask with --mode rag" in said


def test_an_answer_longer_than_the_context_is_the_option_s_fault() -> None:
    why = (
        "a prompt with an answer of 9000 tokens is longer than the target's context of 8192 tokens."
    )
    told = advise({"message": str(PromptTooLong.of(8192, why))}, ["a.md"])
    assert told.startswith("--max-tokens 9000 is more than the target can read and write, 8,192")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("rapid.mode must be one of these", "--mode must be one of these"),
        ("top_p must be less than 1", "--top-p must be less than 1"),
        ("max_tokens must be at least 1", "--max-tokens must be at least 1"),
        ("rapid.documents[1].text is empty", "--document b.md is empty"),
        ("rapid.documents has two documents", "--document has two documents"),
        ("messages[0].content has a lone surrogate", "the question has a lone surrogate"),
        ("raise api.max_tokens in the file", "raise api.max_tokens in the file"),
        ("use `too_long: sections` or `mode: rag`", "use `--sections` or `--mode rag`"),
    ],
)
def test_fields_are_called_as_they_are_typed(message: str, said: str) -> None:
    assert advise({"message": message}, ["a.md", "b.md"]) == said


def test_a_refusal_that_may_pass_says_so() -> None:
    told = advise({"message": "The pool is full.", "retryable": True}, [])
    assert told == "The pool is full. Asking again may help."


def test_the_choices_are_those_of_the_method() -> None:
    assert {*get_args(question_options.Mode)} == {*get_args(config.Mode)}
    assert {*get_args(question_options.Transfer)} == {*get_args(transfers.Transfer)}


def test_the_hint_of_a_plan_names_only_what_can_be_typed() -> None:
    plan = RequestPlan.__new__(RequestPlan)
    object.__setattr__(plan, "own_drafting", None)
    object.__setattr__(plan, "is_raw", False)
    said = advise({"message": plan.hint("target")}, [])
    assert "`--mode rag`" in said
    assert "`--sections`" in said
