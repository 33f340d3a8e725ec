"""Bodies as bytes: what is refused before it is parsed, and what is no body at all."""

from __future__ import annotations

import json

import pytest

from deployments.api.dialects.chat import parsing
from deployments.api.dialects.chat.parsing import parse_chat_request
from deployments.api.http import json_bodies
from deployments.config.api_config import ApiConfig
from rapid.errors import BadRequest

ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_too_many_messages_are_refused_before_they_are_parsed(monkeypatch):
    def parse(body):
        raise AssertionError("It was parsed.")

    monkeypatch.setattr(parsing, "parse_object", parse)
    many = ASK | {"messages": [{"role": "system", "content": "x"}] * 40_000}
    with pytest.raises(BadRequest, match="messages has 40000 entries, and this server takes 2048"):
        parse_chat_request(json.dumps(many).encode())


def test_too_many_strings_are_refused_before_they_are_parsed(monkeypatch):
    """A million keys hold the interpreter's lock for a second."""
    body = json.dumps(ASK | {"x": {str(index): "" for index in range(70_000)}}).encode()
    monkeypatch.setattr(json_bodies, "json", None)
    with pytest.raises(BadRequest, match="has 140008 strings"):
        parse_chat_request(body)
    escaped = json.dumps(ASK | {"x": {f"{index}\\": "" for index in range(70_000)}}).encode()
    with pytest.raises(BadRequest, match="has 140008 strings"):
        parse_chat_request(escaped)
    with pytest.raises(BadRequest, match="opening brackets"):
        parse_chat_request(json.dumps(ASK | {"x": [{}] * 2**19}).encode())


def test_a_text_with_many_quotes_is_one_string():
    quoted = '"a\\" ' * 200_000
    body = ASK | {"messages": [{"role": "user", "content": quoted}]}
    assert parse_chat_request(json.dumps(body).encode()).messages[0].content == quoted


def test_a_document_that_quotes_messages_is_a_text():
    quoted = json.dumps([{"role": "user"}] * 9)
    body = ASK | {"rapid": {"documents": [{"name": "log", "text": quoted}]}}
    asked = parse_chat_request(json.dumps(body).encode(), ApiConfig(max_messages=1))
    assert asked.rapid is not None
    assert asked.rapid.documents is not None
    assert asked.rapid.documents[0].text == quoted


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff", "not UTF-8"),
        (b"\xef\xbb\xbf[]", "must be a JSON object"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_what_is_no_body(body, message):
    with pytest.raises(BadRequest, match=message):
        parse_chat_request(body)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "user", "content": "ab"}] * 4}, "messages"),
        ({"rapid": {"documents": [{"name": "a"}] * 3}}, "rapid.documents"),
        ({"messages": [{"role": "user", "content": "a" * 9}]}, "messages"),
        ({"rapid": {"documents": [{"name": "a", "text": "a" * 7}]}}, "rapid.documents"),
        ({"n": 3}, "n"),
        ({"rapid": {f"key{n}": 1 for n in range(65)}}, "rapid"),
        (
            {"rapid": {"documents": [{"name": "a"}, {f"key{n}": 1 for n in range(65)}]}},
            "rapid.documents[1]",
        ),
    ],
)
def test_what_a_request_multiplies_is_limited(change, param):
    limits = ApiConfig(max_choices=2, max_messages=3, max_documents=2, max_characters=8)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    parse_chat_request(json.dumps(body | {"n": 2}).encode(), limits)
    with pytest.raises(BadRequest, match=r"at most") as refused:
        parse_chat_request(json.dumps(body | change).encode(), limits)
    assert refused.value.param == param


def test_without_a_limit_only_counts_are_limited():
    long = [{"role": "user", "content": "a" * 10_000}]
    parse_chat_request(json.dumps({"model": "m", "messages": long}).encode())
    many = [{"role": "user", "content": "a"}] * 2049
    with pytest.raises(BadRequest, match="2049 entries"):
        parse_chat_request(json.dumps({"model": "m", "messages": many}).encode())
