"""Limits on what a request multiplies, by bodies that go beyond them."""

from __future__ import annotations

import json

import pytest

from deployments.api.chat.parsing import parse_chat_request
from deployments.api.gate.limits import Limits
from rapid.errors import BadRequest


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
    limits = Limits(max_choices=2, max_messages=3, max_documents=2, max_characters=8)
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
