"""What a caller of `rapid.open` may pass: refused as over HTTP, in the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rapid
from deployments.api.dialects.chat.chat_request import ChatRequest, RapidOptions
from deployments.api.dialects.chat.parsing import parse_chat_request
from rapid.chat_messages import Document, Message
from rapid.errors import BadRequest, PromptTooLong
from rapid.messages import GenerateRequest
from rapid.pair.asking import AskSettings, QuestionFields, as_request, in_own_words

DAY = Document("day", "It rained.")


def asked(question: Any = "What is it?", documents: Any = (), **settings: Any) -> GenerateRequest:
    return as_request("local-0", question, documents, settings, is_streamed=False)


def refusal(*args: Any, **settings: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        asked(*args, **settings)
    return refused.value


def test_the_settings_are_those_that_are_validated_and_http_has_all_of_them() -> None:
    names = QuestionFields.model_fields.keys() - {"question", "documents"}
    assert names == AskSettings.__annotations__.keys()
    assert names <= ChatRequest.model_fields.keys() | RapidOptions.model_fields.keys()


def test_what_is_left_out_or_none_is_the_default() -> None:
    bare = asked()
    assert (bare.messages, bare.documents) == ((Message("user", "What is it?"),), ())
    assert (bare.temperature, bare.top_p, bare.max_tokens, bare.stop) == (1.0, 1.0, None, ())
    assert bare.speculation.mode == "auto"
    assert asked(**dict.fromkeys(AskSettings.__annotations__.keys() - {"draft_top_k"})) == bare
    assert asked(draft_top_k=None).speculation.all_draft_tokens
    assert not bare.speculation.all_draft_tokens


def test_a_temperature_that_is_left_out_is_the_default_and_one_that_is_given_is_not() -> None:
    for given, expected in (({}, 0.5), ({"temperature": None}, 0.5), ({"temperature": 0}, 0)):
        request = as_request(
            "local-0", "What?", (), given, is_streamed=False, default_temperature=0.5
        )
        assert request.temperature == expected


@pytest.mark.parametrize("question", ["", " \n", [Message("user", "Hi"), Message("user", "")]])
def test_an_empty_question_is_refused(question: Any) -> None:
    refused = in_own_words(refusal(question))
    assert "there is no question" in str(refused)
    assert refused.param == "question"


def test_everything_arrives() -> None:
    request = asked(
        [Message("developer", "Be kind."), Message("user", "Hi")],
        ("A", DAY, "B", Document("document 1", "C")),
        mode="fused",
        eta=2,
        stop=("a", "b"),
        query="what",
        retrieval_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=-1,
        max_tokens=7,
        refresh=True,
        citations=True,
    )
    assert request.messages == (Message("system", "Be kind."), Message("user", "Hi"))
    names = [document.name for document in request.documents]
    assert names == ["document 2", "day", "document 3", "document 1"]
    assert (request.stop, request.query, request.retrieval_tokens) == (("a", "b"), "what", 9)
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0, 0.5, 3, -1)
    assert (request.max_tokens, request.speculation.eta) == (7, 2.0)
    assert (request.speculation.mode, request.speculation.refresh) == ("fused", True)
    assert (request.citations, asked().citations) == (True, False)
    assert asked(documents=["A"]).documents == (Document("document", "A"),)
    assert asked(stop="###").stop == ("###",)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"mode": "losless"}, "mode"),
        ({"mode": "Lossless"}, "mode"),
        ({"max_tokens": 20.0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": 3}, "stop"),
        ({"retrieval_tokens": 0}, "retrieval_tokens"),
        ({"query": " "}, "query"),
        ({"query": 3}, "query"),
        ({"refresh": "yes"}, "refresh"),
        ({"citations": 1}, "citations"),
        ({"eta": -1}, "eta"),
        ({"mode": "paper", "transfer": "boost"}, "transfer"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_a_setting_is_refused_as_over_http(settings: dict[str, Any], param: str) -> None:
    refused = refusal(**settings)
    assert refused.param == param
    own = {name: settings[name] for name in settings if name in RapidOptions.model_fields}
    others = {name: settings[name] for name in settings if name not in own}
    messages = [{"role": "user", "content": "What is it?"}]
    body = {"model": "m", "messages": messages, "rapid": own} | others
    with pytest.raises(BadRequest) as over_http:
        parse_chat_request(json.dumps(body).encode())
    assert str(refused) == str(over_http.value).removeprefix("rapid.")


@pytest.mark.parametrize(
    ("question", "documents", "sentence"),
    [
        (
            3,
            (),
            "question must be a text or a list of rapid.Message(role, text); it is of",
        ),
        ([{"role": "user", "content": "Hi"}], (), "rapid.Message(role, text); it has an entry of"),
        ([], (), "question must not be empty"),
        (
            [Message("bot", "Hi")],
            (),
            "question[0].role must be 'system', 'developer', 'user', 'assistant'",
        ),
        ([Message("user", 3)], (), "question[0].content must be a valid string"),  # type: ignore[arg-type]
        ([Message("system", "Hi")], (), "question has no message with role 'user'"),
        ("\ud800", (), "question has a lone surrogate"),
        ("Hi", "A text.", "documents is one text: put it into a list"),
        (
            "Hi",
            b"A",
            "documents must be a list of texts, paths or rapid.Document(name, text); it is",
        ),
        ("Hi", [b"A"], "rapid.Document(name, text); it has an entry of type bytes"),
        ("Hi", Path("a"), "rapid.Document(name, text); it is of type PosixPath"),
        ("Hi", [Path("a")], "rapid.Document(name, text); it has an entry of type PosixPath"),
        ("Hi", [" "], "documents[0].text is empty"),
        ("Hi", ["A", "\ud800"], "documents[1].text has a lone surrogate"),
        ("Hi", [DAY, DAY], "documents has two documents named 'day': rename one"),
        ("Hi", [Document("a\nb", "A")], "documents[0].name must be one line"),
    ],
)
def test_a_question_or_document_is_refused_by_its_name(
    question: Any, documents: Any, sentence: str
) -> None:
    refused = refusal(question, documents)
    assert sentence in str(refused)
    assert str(refused).startswith(refused.param or "nothing")


def test_an_unknown_setting_is_named_with_the_one_that_was_meant() -> None:
    refused = refusal(temprature=0)
    assert str(refused) == "temprature is not known: did you mean 'temperature'?"
    assert refused.param == "temprature"


def test_what_a_chat_and_a_named_document_need_is_at_the_top() -> None:
    assert (rapid.Message, rapid.Document) == (Message, Document)


def test_a_refusal_of_the_common_path_names_settings_as_this_way_to_ask_has_them() -> None:
    refused = in_own_words(BadRequest("rapid.mode 'fused' needs a drafter", "rapid.mode", "code"))
    assert refused.args == ("mode 'fused' needs a drafter", "mode", "code")
    assert in_own_words(PromptTooLong("It is too long.")).param == "question"
    assert isinstance(in_own_words(PromptTooLong("It is too long.")), PromptTooLong)
