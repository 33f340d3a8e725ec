"""Request bodies as the orchestrator gets them."""

from __future__ import annotations

import json
from datetime import date
from typing import Any, ClassVar

import pytest
from annotated_types import Ge, Gt, Le

from deployments.api.dialects.chat.chat_request import ChatRequest, RapidOptions
from deployments.api.dialects.chat.parsing import parse_chat_request
from rapid.chat_messages import Document, Message
from rapid.config import SamplingConfig, SpeculationConfig
from rapid.errors import BadRequest
from rapid.messages import SpeculationRequest


def parse(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return parse_chat_request(json.dumps(body).encode())


def generate(**fields: Any) -> Any:
    return parse(**fields).as_generate_request("id", "acme")


def test_defaults():
    request = generate()
    assert (request.request_id, request.tenant) == ("id", "acme")
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (1, 1, None, None)
    assert (request.num_choices, request.max_tokens, request.num_logprobs) == (1, None, None)
    assert request.speculation == SpeculationRequest()


def test_the_day_is_settled_when_the_request_comes(monkeypatch):
    monkeypatch.setattr(
        "deployments.api.dialects.chat.chat_request.utc_day", lambda: date(2026, 1, 31)
    )
    assert generate().date == date(2026, 1, 31)
    assert generate(rapid={"date": "2026-01-30"}).date == date(2026, 1, 30)


def test_nulls_are_defaults():
    nulls = dict.fromkeys(ChatRequest.model_fields.keys() - {"model", "messages"})
    assert generate(**nulls) == generate()
    unsupported = dict.fromkeys(["tools", "logit_bias", "response_format", "presence_penalty"])
    assert generate(**unsupported) == generate()
    rapid = dict.fromkeys(RapidOptions.model_fields.keys() - {"draft_top_k"})
    assert generate(rapid=rapid) == generate()


def test_everything_arrives():
    request = generate(
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("One ", "two")]},
        ],
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=-1,
        stop="###",
        max_completion_tokens=9,
        n=2,
        logprobs=True,
        rapid={
            "mode": "lossless",
            "eta": 2,
            "transfer": "distill",
            "max_draft": 4,
            "coupling": "maximal",
            "plausibility": 0.2,
            "draft_top_k": 8,
            "retrieval_tokens": 100,
            "documents": [{"name": "a.txt", "text": "A"}],
            "query": "what",
            "date": "2024-02-29",
            "explain": "tokens",
            "citations": True,
        },
    )
    assert request.citations
    assert request.messages == (
        Message("system", "Be kind."),
        Message("assistant", "Hello."),
        Message("user", "One two"),
    )
    assert request.documents == (Document("a.txt", "A"),)
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0, 0.5, 3, -1)
    assert (request.stop, request.max_tokens, request.num_choices) == (("###",), 9, 2)
    assert request.num_logprobs == 0
    assert (request.query, request.retrieval_tokens, request.explain) == ("what", 100, True)
    assert request.date == date(2024, 2, 29)
    assert request.speculation == SpeculationRequest(
        mode="lossless",
        transfer="distill",
        eta=2.0,
        max_draft=4,
        coupling="maximal",
        plausibility=0.2,
        draft_top_k=8,
    )


def test_no_cut_is_not_the_default_cut():
    assert generate(rapid={"draft_top_k": None}).speculation.all_draft_tokens
    assert not generate(rapid={}).speculation.all_draft_tokens


def test_stops():
    assert generate(stop=["a", "b"]).stop == ("a", "b")
    assert generate(stop=[]).stop == ()
    with pytest.raises(BadRequest, match=r"stop\[1\] is too long: at most 1000"):
        parse(stop=["a", "b" * 1001])


def test_logprobs():
    assert generate(logprobs=False).num_logprobs is None
    assert generate(logprobs=True, top_logprobs=5).num_logprobs == 5


def test_turns_of_an_earlier_answer_may_come_back():
    """As the SDK dumps a message: with the fields that it did not use."""
    turn = {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": None}
    asked = {"role": "user", "content": "Sure?"}
    assert generate(messages=[asked, turn, asked]).messages[1] == Message("assistant", "Yes.")


@pytest.mark.parametrize(
    ("turn", "param"),
    [
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            "[1].function_call",
        ),
        ({"role": "function", "content": "18 degrees", "name": "f"}, "[1].role"),
    ],
)
def test_turns_that_call_older_functions_are_refused_in_their_own_words(turn: Any, param: str):
    asked = {"role": "user", "content": "Sure?"}
    with pytest.raises(BadRequest, match="is of OpenAI's older functions") as refused:
        parse(messages=[asked, turn, asked])
    assert (refused.value.param, refused.value.code) == (f"messages{param}", "unsupported")


def test_a_part_that_is_a_string_is_not_quoted_as_a_type():
    with pytest.raises(BadRequest, match="a part that is no object") as refused:
        parse(messages=[{"role": "user", "content": ["secret"]}])
    assert "secret" not in str(refused.value)


def test_a_bias_of_logits_arrives_as_pairs_by_id():
    assert generate(logit_bias={"7": -100, "5": 2.5}).logit_bias == ((5, 2.5), (7, -100.0))
    assert generate(logit_bias={}) == generate(logit_bias=[]) == generate()


@pytest.mark.parametrize(
    ("bias", "why"),
    [
        ({"5": 101}, "from -100 to 100"),
        ({"5": float("nan")}, "from -100 to 100"),
        ({"5": True}, "from -100 to 100"),
        ({"5": "1"}, "from -100 to 100"),
        ({"-1": 1}, "ids of tokens as its keys"),
        ({"the": 1}, "ids of tokens as its keys"),
        ({"5": 1, "05": 2}, "names token 5 twice"),
        ({str(token): 1 for token in range(301)}, "at most 300 tokens"),
        ([[5, 1]], "must be an object"),
    ],
)
def test_a_bias_that_is_none_is_refused_in_a_sentence(bias: Any, why: str):
    with pytest.raises(BadRequest, match=f"^logit_bias .*{why}") as refused:
        generate(logit_bias=bias)
    assert refused.value.param == "logit_bias"


def test_ranges_are_those_of_the_configuration():
    def bounds(model: Any, name: str) -> set[Any]:
        metadata = model.model_fields[name].metadata
        return {each for each in metadata if isinstance(each, Ge | Gt | Le)}

    for name in ("eta", "max_draft", "plausibility", "draft_top_k"):
        assert bounds(RapidOptions, name) == bounds(SpeculationConfig, name)
    for name in ("temperature", "top_p", "top_k", "seed"):
        assert bounds(ChatRequest, name) == bounds(SamplingConfig, name)


@pytest.mark.parametrize("field", ["documents", "mode", "eta"])
def test_our_fields_at_the_top_are_sent_to_their_place(field):
    with pytest.raises(BadRequest, match="belongs into the object 'rapid'") as refused:
        generate(**{field: "anything"})
    assert refused.value.param == field


def test_vllms_spellings_of_all_tokens_and_its_salt():
    assert generate(top_k=-1).top_k is generate(top_k=0).top_k is None
    assert (generate().cache_salt, generate(cache_salt="mine").cache_salt) == ("", "mine")
    assert generate(priority=0) == generate()
    assert generate(priority=-1).priority == -1


class TestDocumentsOfMessages:
    CHAT: ClassVar[Any] = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]

    def test_a_document_belongs_to_the_message_that_it_came_with(self):
        documents = [{"name": "a", "text": "A"}, {"name": "b", "text": "B", "message": 2}]
        body = {"model": "m", "messages": self.CHAT, "rapid": {"documents": documents}}
        sent = parse_chat_request(json.dumps(body).encode()).as_generate_request("r", "t")
        assert [each.name for each in sent.documents] == ["a", "b"]
        assert [each.documents for each in sent.messages] == [(), (), ("b",)]

    @pytest.mark.parametrize("number", [1, 3, 2**40])
    def test_it_has_to_be_one_of_the_users(self, number: int):
        documents = [{"name": "a", "text": "A", "message": number}]
        body = {"model": "m", "messages": self.CHAT, "rapid": {"documents": documents}}
        with pytest.raises(BadRequest, match=f"message {number}, which is none of the user's"):
            parse_chat_request(json.dumps(body).encode())

    def test_so_does_a_file_that_is_a_part_of_it(self):
        part = {"type": "file", "file": {"file_id": "f"}}
        last = {"role": "user", "content": [part, {"type": "text", "text": "Two?"}]}
        body = {"model": "m", "messages": [*self.CHAT[:2], last], "rapid": {"file_ids": ["g"]}}
        stored = parse_chat_request(json.dumps(body).encode()).stored
        assert stored is not None
        assert (stored.file_ids, stored.places) == (("f", "g"), {"f": 2})
