"""What is refused of a request before any of its text is read, and by the name of which field."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rapid.answering.plan.request_checks import (
    check_blocks,
    check_lengths,
    check_penalty,
    check_tokens,
)
from rapid.answering.plan.request_plan import sampling_of
from rapid.chat_messages import Document
from rapid.config import SpeculationConfig
from rapid.errors import BadRequest
from tests.rapid.answering.plan.test_request_plan import request


@pytest.mark.parametrize(
    ("asked", "param", "whose"),
    [
        ({"max_tokens": 4095, "retrieval_tokens": 1023}, None, None),
        ({"max_tokens": 4096}, "max_tokens", "target"),
        ({"retrieval_tokens": 1024}, "rapid.retrieval_tokens", "drafter"),
    ],
)
def test_lengths_that_fit_no_prompt_are_refused_before_any_is_read(asked, param, whose):
    if param is None:
        return check_lengths(replace(request(), **asked), 4096, 1024)
    with pytest.raises(BadRequest, match=f"the {whose}'s context of") as refused:
        check_lengths(replace(request(), **asked), 4096, 1024, whose="target", hint=" Shorten it.")
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("asked", "settings", "is_refused"),
    [
        ({}, {"draft_top_k": None, "max_draft": 64}, True),  # blocks of 65 MB
        ({}, {"draft_top_k": 10**9, "max_draft": 64}, True),
        ({}, {"draft_top_k": None, "max_draft": 10}, False),  # as `paper` does
        ({"num_choices": 8}, {"draft_top_k": None, "max_draft": 10}, True),
        ({"num_choices": 128}, {"draft_top_k": 64, "max_draft": 64}, False),
        ({"mode": "plain"}, {"draft_top_k": None, "max_draft": 64}, False),
    ],
)
def test_a_round_of_blocks_has_a_size(asked, settings, is_refused):
    mode = asked.pop("mode", "auto")
    asking = replace(request(mode=mode), **asked)
    if not is_refused:
        return check_blocks(asking, SpeculationConfig(**settings), 128_256)
    with pytest.raises(BadRequest, match=r"lower rapid\.max_draft") as refused:
        check_blocks(asking, SpeculationConfig(**settings), 128_256)
    assert refused.value.param == "rapid.draft_top_k"


def test_a_bias_reaches_the_sampling_and_may_name_only_tokens_that_there_are() -> None:
    biased = replace(request(), logit_bias=((9, -100.0),))
    assert sampling_of(biased).logit_bias == ((9, -100.0),)
    check_tokens(sampling_of(biased), 10)
    with pytest.raises(BadRequest, match="names token 9; the models have the tokens 0 to 8"):
        check_tokens(sampling_of(biased), 9)


def test_a_penalty_of_what_documents_say_must_be_meant() -> None:
    about = replace(request(), documents=(Document("a", "b"),), repetition_penalty=1.1)
    with pytest.raises(BadRequest, match="penalize_documents") as refused:
        check_penalty(about)
    assert refused.value.param == "repetition_penalty"
    check_penalty(replace(about, penalize_documents=True))
    check_penalty(replace(about, documents=()))
    check_penalty(replace(about, repetition_penalty=0.9))
